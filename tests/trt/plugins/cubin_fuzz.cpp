// Parses the programs that stdin holds (each: its length in 32 bits, its bytes) and prints a line for each: "refused: ..."
// or "inputs outputs launches : values of all expressions", or "overflow" for these, at sizes 1, 2, 3 and so on.
// Built by test_cubin_program.py with sanitizers.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "cubin_program.h"

int main() {
  uint32_t length = 0;
  while (std::fread(&length, 4, 1, stdin) == 1) {
    // Exactly as many bytes as it has, so that a read past the end is seen.
    std::string bytes(length, '\0');
    if (length && std::fread(&bytes[0], 1, length, stdin) != length) return 2;
    bytes.shrink_to_fit();
    stof::CubinProgram program;
    char error[256];
    if (const char* const why = stof::parse_cubin_program(bytes, program, error, sizeof error)) {
      std::printf("refused: %s\n", why);
      continue;
    }
    for (const auto& images : program.kernels)
      for (const auto& image : images) {
        const std::string cubin = program.bytes.substr(image.offset, image.length);
        if (cubin.size() != image.length || stof::pick_image(images, image.arch / 10, image.arch % 10)->arch != image.arch) return 3;
      }
    stof::TensorDesc inputs[stof::kMaxTensors] = {};
    int64_t size = 1;
    for (size_t i = 0; i < program.inputs.size(); ++i) {
      inputs[i].rank = program.inputs[i].rank;
      for (int32_t axis = 0; axis < inputs[i].rank; ++axis) inputs[i].dims[axis] = size++;
    }
    int64_t values[stof::CubinProgram::kMaxNodes];
    std::printf("%zu %zu %zu :", program.inputs.size(), program.outputs.size(), program.launches.size());
    if (!stof::evaluate_nodes(program, inputs, values)) {
      std::printf(" overflow\n");
      continue;
    }
    for (size_t i = 0; i < program.nodes.size(); ++i) std::printf(" %lld", static_cast<long long>(values[i]));
    std::printf("\n");
  }
  return 0;
}
