// What a StofFusedRegion node with template `cubin` carries: compiled kernels and how to launch them. Packed by
// optimizer/stof_onnx/kernels/cubin_program.py, whose text describes the bytes. Knows neither TensorRT nor CUDA.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor_desc.h"

namespace stof {

struct CubinProgram {
  static constexpr uint32_t kNone = 0xffffffff;
  static constexpr int32_t kMaxNodes = 256, kMaxArgs = 64, kMaxHidden = 8;

  // Expressions over the sizes of inputs; `left` and `right` of operations are earlier nodes.
  enum class Op : uint32_t { kConstant, kSize, kSum, kSub, kProd, kFloorDiv, kCeilDiv, kMax, kMin };
  struct Node {
    Op op;
    uint32_t left, right;  // kConstant: low and high word; kSize: input and axis
    int64_t constant() const { return static_cast<int64_t>(uint64_t{right} << 32 | left); }
  };
  struct Tensor {
    ElementType type;
    int32_t rank;
    uint32_t dims[8];  // nodes; kNone: any size (inputs only)
  };
  struct Image {
    int32_t arch;  // compute capability times ten
    int32_t threads, shared, hidden;
    std::string name;
    size_t offset, length;  // of the cubin in `bytes`
  };
  enum class ArgKind : uint32_t { kInput, kOutput, kWorkspace, kInt32, kInt64, kFloat32 };
  struct Arg {
    ArgKind kind;
    uint32_t value;  // the tensor's number; a node; the bits of a float
  };
  struct Launch {
    uint32_t kernel, fallback;  // fallback: kNone where pointers have to be aligned
    uint32_t alignment;
    uint32_t grid[3];
    std::vector<Arg> args;
  };

  std::string bytes;
  std::vector<Node> nodes;
  std::vector<Tensor> inputs, outputs;
  uint32_t workspace;
  std::vector<std::vector<Image>> kernels;  // each: one image an architecture
  std::vector<Launch> launches;
};

// Trusts nothing: every length, count and index is checked, and the frame of each cubin, since the driver is told no
// length. nullptr, or what is wrong, in `error`. Throws std::bad_alloc.
const char* parse_cubin_program(const std::string& bytes, CubinProgram& program, char* error, size_t error_size);

// The value of every node, for the inputs' sizes. False on overflow or a division by what is not positive.
bool evaluate_nodes(const CubinProgram& program, const TensorDesc* inputs, int64_t (&values)[CubinProgram::kMaxNodes]);

// The image for a GPU of compute capability major.minor: for exactly that, else for the nearest earlier 8.x of an 8.x.
// nullptr where there is none.
const CubinProgram::Image* pick_image(const std::vector<CubinProgram::Image>& images, int32_t major, int32_t minor);

}  // namespace stof
