// What both adapters need of a StofFusedRegion node, whatever its template: inputs and outputs, types, shapes, workspace
// and the launch. Knows no TensorRT types.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "region_config.h"
#include "tensor_desc.h"

namespace stof {

// Builds the dimensions of outputs from those of the inputs, some of which are known at run time only.
class DimBuilder {
 public:
  using Dim = const void*;
  enum class Op { kSum, kSub, kProd, kMax, kMin, kFloorDiv, kCeilDiv };
  virtual int32_t rank(int32_t input) const = 0;
  virtual Dim input(int32_t input, int32_t axis) = 0;
  virtual Dim constant(int64_t value) = 0;
  virtual Dim operation(Op op, Dim a, Dim b) = 0;

 protected:
  ~DimBuilder() = default;
};

struct OutputDims {
  int32_t rank;
  DimBuilder::Dim dims[8];
};

// Functions that return a text return nullptr, or a sentence about what is wrong, written to `error`.
class RegionCore {
 public:
  virtual ~RegionCore() = default;

  virtual int32_t num_inputs() const = 0;
  virtual int32_t num_outputs() const = 0;  // inputs and outputs together: at most kMaxTensors

  // Types of the outputs; `inputs` has num_inputs() of them.
  virtual ElementType output_type(int32_t output, const ElementType* inputs) const = 0;

  // False where the ranks of the inputs do not fit.
  virtual bool output_dims(int32_t output, DimBuilder& builder, OutputDims& dims) const = 0;

  // Whether tensor `pos` of `tensors` (inputs, then outputs) may have its type, given those before it. Sizes that are not
  // known yet are negative.
  virtual bool supports(int32_t pos, const TensorDesc* tensors) const = 0;

  // Whether the region runs with these inputs. Sets `workspace_bytes` when it returns nullptr.
  virtual const char* check(const TensorDesc* inputs, int32_t num_inputs, size_t& workspace_bytes, char* error,
                            size_t error_size) const = 0;

  // Whether the current GPU runs it at all; nullptr where there is none to ask.
  virtual const char* refused_here(char* error, size_t error_size) const = 0;

  // Before the first enqueue in the current CUDA context, as often as TensorRT likes: loads what launches need.
  virtual const char* prepare(char* error, size_t error_size) {
    static_cast<void>(error);
    static_cast<void>(error_size);
    return nullptr;
  }

  // Neither allocates nor synchronises.
  virtual const char* enqueue(const TensorDesc* inputs, int32_t num_inputs, const void* const* in, void* const* out,
                              void* workspace, cudaStream_t stream, char* error, size_t error_size) const = 0;
};

// The core that `config` asks for; null, with the reason in `error`, where this library has none. Throws std::bad_alloc.
std::unique_ptr<RegionCore> make_region(const RegionConfig& config, char* error, size_t error_size);

}  // namespace stof
