// kGemmEpilogue by cuBLASLt, which is looked for at run time: nothing links it.
#pragma once
#include "stof/fused.h"

namespace stof {

// What launches want of device memory, for whatever algorithm is chosen.
constexpr size_t kCublasLtWorkspace = size_t{32} << 20;

// nullptr when cuBLASLt's epilogues compute `p`, which has been checked otherwise; else what they lack.
const char* cublaslt_lacks(const FusedParams& p);

// cudaErrorNotSupported where there is no library or it knows no algorithm. Thread-safe.
cudaError_t cublaslt_launch(const FusedParams& p, cudaStream_t stream);

}  // namespace stof
