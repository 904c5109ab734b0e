// What both adapters share: which inputs a StofAttention node has, which types it takes, how its shapes fit together,
// and the launch. Knows no TensorRT types, so that it builds and behaves alike for every TensorRT version.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "attention_config.h"
#include "stof/attention.h"
#include "tensor_desc.h"

namespace stof {

// Places of the inputs after Q, K, V (or the packed one).
enum MaskInput : int32_t { kFullRowPtr, kFullColIdx, kPartRowPtr, kPartColIdx, kBitmap, kRowOrder, kMaskIndex, kMaskInputs };

// Why `kernel` can not run on a GPU of compute capability major.minor; nullptr where it can.
inline const char* architecture_refusal(Kernel kernel, int32_t major, int32_t minor) {
  if (kernel == Kernel::kBlockSm90 && (major != 9 || minor != 0))
    return "kernel block_sm90 needs a Hopper GPU (compute capability 9.0): build the engine on the GPU that it shall run on";
  if (major < 8) return "the plugins need a GPU of compute capability 8.0 or newer";
  return nullptr;
}

class AttentionCore {
 public:
  explicit AttentionCore(const AttentionConfig& config) : config_(config) {}
  const AttentionConfig& config() const { return config_; }

  int32_t num_inputs() const;
  // Index of an input, -1 where the node has none.
  int32_t mask_input(MaskInput which) const { return (config_.packed() ? 1 : 3) + which; }
  int32_t bias_input() const;
  int32_t kv_input() const;
  int32_t shape_input() const;  // packed with S known at run time: its dims[1] is S, its contents are not read

  // Whether tensor `pos` of `tensors` (inputs, then the output) may have its type, given the type of input 0. Sizes that are
  // not known yet are negative.
  bool supports(int32_t pos, const TensorDesc* tensors) const;

  // Fills all of `p` but the pointers from the shapes of inputs and output. nullptr, or what does not fit, in `error`.
  const char* plan(const TensorDesc* inputs, int32_t num_inputs, AttentionParams& p, char* error, size_t error_size) const;

  // `plan`, and whether a kernel of this build runs its outcome. Sets `workspace_bytes` when it returns nullptr.
  const char* check(const TensorDesc* inputs, int32_t num_inputs, size_t& workspace_bytes, char* error, size_t error_size) const;

  // architecture_refusal for the current GPU; nullptr where there is none to ask.
  const char* refused_here(char* error, size_t error_size) const;

  // Neither allocates nor synchronises. nullptr, or what went wrong, in `error`.
  const char* enqueue(const TensorDesc* inputs, int32_t num_inputs, const void* const* in, void* out, void* workspace,
                      cudaStream_t stream, char* error, size_t error_size) const;

 private:
  bool kernel_takes(const TensorDesc* inputs) const;

  AttentionConfig config_;
};

}  // namespace stof
