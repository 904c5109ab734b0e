// Host side of the GEMM kernel: its tensor maps and the launch of a variant. The parameters have been checked.
#pragma once
#include <algorithm>

#include "fused/gemm_sm90.cuh"
#include "fused/variants.h"
#include "sm90/tensor_map.h"

namespace stof::sm90 {

constexpr int kGroup = 8;  // blocks along m that walk along n together

// A map of a row-major matrix whose boxes are 64 columns (128 bytes, swizzled) by `box_rows`.
inline bool matrix_map(CUtensorMap* map, DType dtype, const void* data, int rows, int columns, int64_t stride, int box_rows) {
  const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t strides[1] = {cuuint64_t(2 * (rows > 1 ? stride : columns))};  // of a single row it does not matter
  const cuuint32_t box[2] = {64, cuuint32_t(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const auto type = dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode_tiled()(map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class C>
cudaError_t launch(const FusedParams& p, cudaStream_t stream) {
  if (encode_tiled() == nullptr) return cudaErrorNotSupported;
  GemmArgs args{};
  if (!matrix_map(&args.a, p.dtype, p.a, p.m, p.k, p.stride_a, C::kRows) ||
      !matrix_map(&args.b, p.dtype, p.b, p.k, p.n, p.stride_b, kGemmStep) ||
      !matrix_map(&args.out, p.dtype, p.out, p.m, p.n, p.stride_out, 16) ||
      (p.b2 && !matrix_map(&args.b2, p.dtype, p.b2, p.k, p.n, p.stride_b2, kGemmStep)) ||
      (p.residual && !matrix_map(&args.residual, p.dtype, p.residual, p.m, p.n, p.stride_residual, 16))) {
    return cudaErrorInvalidValue;
  }
  int device, multiprocessors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const auto ceiling = [](int a, int b) { return (a + b - 1) / b; };
  args.bias = p.bias;
  args.bias2 = p.bias2;
  args.n = p.n;
  args.steps = ceiling(p.k, kGemmStep);
  args.clusters_m = ceiling(p.m, C::kRows * C::kCluster);
  args.tiles_n = ceiling(p.n, C::kOutColumns);
  args.tiles = args.clusters_m * args.tiles_n;
  args.group = kGroup / C::kCluster;
  args.activation = p.activation;
  args.has_residual = p.residual != nullptr;
  const auto kernel = gemm_sm90_kernel<C>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(multiprocessors / C::kCluster, args.tiles) * C::kCluster;
  kernel<<<blocks, kGemmThreads, C::kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch_variant(const FusedParams& p, int32_t index, cudaStream_t stream) {
  int32_t i = 0;
#define STOF_LAUNCH(name, bands, columns, stages, cluster, ping_pong, gated, buffers) \
  if (i++ == index) return launch<GemmConfig<Element, bands, columns, stages, cluster, ping_pong, gated, buffers>>(p, stream);
  if (p.template_id == FusedTemplate::kGatedMlp) {
    STOF_GATED_VARIANTS(STOF_LAUNCH)
  } else {
    STOF_GEMM_VARIANTS(STOF_LAUNCH)
  }
#undef STOF_LAUNCH
  return cudaErrorInvalidValue;
}

}  // namespace stof::sm90
