// The Hopper kernel's part of dispatch (see attention_sm90.cuh for the lowered mask it reads).
#pragma once
#include "stof/attention.h"

namespace stof {

// nullptr when attention_block_sm90 runs `p` on a device of compute capability 9.0, else why not.
const char* attention_block_sm90_unsupported(const AttentionParams& p);

// Workspace of attention_block_sm90; null workspace is allowed and costs balance, not correctness.
size_t attention_block_sm90_workspace_bytes(const AttentionParams& p);

cudaError_t attention_block_sm90(const AttentionParams& p, cudaStream_t stream);

}  // namespace stof
