// Host side of the GEMM kernel: its tensor maps and the launch of a variant. The parameters have been checked.
#pragma once
#include <algorithm>

#include "fused/gemm_sm90.cuh"
#include "fused/gemm_split_sm90.cuh"
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

// Everything but the order of tiles, which the variant decides.
inline cudaError_t make_args(GemmArgs* args, const FusedParams& p, int rows, int cluster_rows, int columns) {
  if (encode_tiled() == nullptr) return cudaErrorNotSupported;
  if (!matrix_map(&args->a, p.dtype, p.a, p.m, p.k, p.stride_a, rows) ||
      !matrix_map(&args->b, p.dtype, p.b, p.k, p.n, p.stride_b, kGemmStep) ||
      !matrix_map(&args->out, p.dtype, p.out, p.m, p.n, p.stride_out, 16) ||
      (p.b2 && !matrix_map(&args->b2, p.dtype, p.b2, p.k, p.n, p.stride_b2, kGemmStep)) ||
      (p.residual && !matrix_map(&args->residual, p.dtype, p.residual, p.m, p.n, p.stride_residual, 16))) {
    return cudaErrorInvalidValue;
  }
  const auto ceiling = [](int a, int b) { return (a + b - 1) / b; };
  args->bias = p.bias;
  args->bias2 = p.bias2;
  args->residual_data = p.residual;
  args->out_data = p.out;
  args->stride_residual = p.stride_residual;
  args->stride_out = p.stride_out;
  args->m = p.m;
  args->n = p.n;
  args->steps = ceiling(p.k, kGemmStep);
  args->clusters_m = ceiling(p.m, cluster_rows);
  args->tiles_n = ceiling(p.n, columns);
  args->tiles = args->clusters_m * args->tiles_n;
  args->group = kGroup * rows / cluster_rows;
  args->cluster = cluster_rows / rows;
  args->activation = p.activation;
  args->has_residual = p.residual != nullptr;
  args->rotation = {reinterpret_cast<const float2*>(p.rotation), p.rotated_columns, p.head_dim, p.positions};
  return cudaSuccess;
}

template <class Kernel>
cudaError_t launch_kernel(Kernel kernel, const GemmArgs& args, int blocks, int shared_bytes, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kGemmThreads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class C>
cudaError_t launch(const FusedParams& p, cudaStream_t stream) {
  GemmArgs args{};
  int device, multiprocessors;
  cudaError_t error = make_args(&args, p, C::kRows, C::kRows * C::kCluster, C::kOutColumns);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const int blocks = std::min(multiprocessors / C::kCluster, args.tiles) * C::kCluster;
  return launch_kernel(gemm_sm90_kernel<C>, args, blocks, C::kSharedBytes, stream);
}

template <class C>
cudaError_t launch_split(const FusedParams& p, cudaStream_t stream) {
  GemmArgs args{};
  const cudaError_t error = make_args(&args, p, C::kRows, C::kRows, C::kColumns);
  if (error != cudaSuccess) return error;
  return launch_kernel(gemm_split_sm90_kernel<C>, args, args.tiles * C::kSplit, C::kSharedBytes, stream);
}

template <class Element>
cudaError_t launch_variant(const FusedParams& p, int32_t index, cudaStream_t stream) {
  int32_t i = 0;
#define STOF_LAUNCH(name, bands, columns, stages, cluster, ping_pong, gated, buffers, ...) \
  if (i++ == index) return launch<GemmConfig<Element, bands, columns, stages, cluster, ping_pong, gated, buffers>>(p, stream);
#define STOF_LAUNCH_SPLIT(name, split, ...) \
  if (i++ == index) return launch_split<GemmSplitConfig<Element, split>>(p, stream);
  if (p.template_id == FusedTemplate::kGatedMlp) {
    STOF_GATED_VARIANTS(STOF_LAUNCH)
  } else {
    STOF_GEMM_VARIANTS(STOF_LAUNCH)
    STOF_SPLIT_VARIANTS(STOF_LAUNCH_SPLIT)
  }
#undef STOF_LAUNCH
#undef STOF_LAUNCH_SPLIT
  return cudaErrorInvalidValue;
}

}  // namespace stof::sm90
