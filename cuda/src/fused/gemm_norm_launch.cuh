// Host side of the kernel with a norm: the launch of a variant. The parameters have been checked.
#pragma once
#include "fused/gemm_launch.cuh"
#include "fused/gemm_norm_sm90.cuh"

namespace stof::sm90 {

// A cluster for each tile of rows, as many as the GPU holds at a time: they stay until all tiles are done.
template <class C>
cudaError_t launch_norm(const FusedParams& p, cudaStream_t stream) {
  GemmNormArgs args{};
  cudaError_t error = make_args(&args, p, C::kRows, C::kRows, p.n);
  if (error != cudaSuccess) return error;
  if (p.sum && !matrix_map(&args.sum, p.dtype, p.sum, p.m, p.n, p.stride_sum, 16)) return cudaErrorInvalidValue;
  args.cluster = (p.n + C::kColumns - 1) / C::kColumns;
  args.scale = p.scale;
  args.shift = p.shift;
  args.epsilon = p.epsilon;
  args.rms = p.norm == Norm::kRms;
  args.keep_sum = p.sum != nullptr;
  const auto kernel = gemm_norm_sm90_kernel<C>;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(args.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(args.cluster);
  config.blockDim = dim3(kGemmThreads);
  config.dynamicSmemBytes = C::kSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error != cudaSuccess) return error;
  if (clusters < 1) return cudaErrorLaunchOutOfResources;
  config.gridDim = dim3(std::min(clusters, args.tiles) * args.cluster);
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <class Element>
cudaError_t launch_norm_variant(const FusedParams& p, int32_t index, cudaStream_t stream) {
  int32_t i = 0;
#define STOF_LAUNCH_NORM(name, bands, columns, stages, buffers, ...) \
  if (i++ == index) return launch_norm<GemmNormConfig<Element, bands, columns, stages, buffers>>(p, stream);
  STOF_NORM_VARIANTS(STOF_LAUNCH_NORM)
#undef STOF_LAUNCH_NORM
  return cudaErrorInvalidValue;
}

}  // namespace stof::sm90
