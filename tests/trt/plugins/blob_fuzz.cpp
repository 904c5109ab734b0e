// Mutates what an engine stores of the plugins, in process and so fast enough for a million blobs: words, bits, lengths,
// insertions and deletions, mostly under a right length and checksum, so that the checks behind them are reached.
//   blob_fuzz SEED COUNT PROGRAM: COUNT blobs each of an attention, of regions and of the cubin program in the file PROGRAM.
// Prints how many of each were accepted; exits with 3 where an accepted one does not come back as the bytes it was, or
// leads somewhere it must not. Built by test_blob_fuzz.py with sanitizers.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "attention_config.h"
#include "cubin_program.h"
#include "region_config.h"

namespace {

using Bytes = std::vector<unsigned char>;
constexpr size_t kHeaderBytes = 16;  // magic, format, length, checksum
constexpr uint32_t kWords[] = {0,   1,   2,   3,    4,    7,     8,     15,         16,         31,          32,          63,         64,          128,        190,
                               255, 256, 999, 1000, 1024, 65535, 65536, 0x7fffffff, 0x80000000, 0xfffffffcu, 0xffffffffu, 0x7f800000, 0xff800000u, 0x7fc00000};

std::mt19937_64 rng;
char error[256];

size_t below(size_t n) { return rng() % n; }

uint32_t word() {
  switch (below(4)) {
    case 0: return kWords[below(std::size(kWords))];
    case 1: return static_cast<uint32_t>(below(64));
    case 2: return static_cast<uint32_t>(below(300));
    default: return static_cast<uint32_t>(rng());
  }
}

void mutate_once(Bytes& bytes, size_t first) {
  if (bytes.size() <= first + 4) return;
  const size_t at = first + below(bytes.size() - first);
  switch (below(7)) {
    case 0: bytes[at] ^= static_cast<unsigned char>(1u << below(8)); break;
    case 1: bytes.resize(at); break;
    case 2: bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at), 1 + below(16), static_cast<unsigned char>(rng())); break;
    case 3: bytes.erase(bytes.begin() + static_cast<ptrdiff_t>(at), bytes.begin() + static_cast<ptrdiff_t>(std::min(bytes.size(), at + 1 + below(32)))); break;
    default: {
      const uint32_t value = word();
      std::memcpy(&bytes[first / 4 * 4 + 4 * below((bytes.size() - first) / 4)], &value, 4);
    }
  }
}

// A copy with one to four mutations, of exactly its size, so that a read past the end is seen. `has_length`: the header's
// third word is the length of the blob.
Bytes mutated(const Bytes& blob, bool has_length) {
  Bytes bytes = blob;
  const size_t first = below(8) ? kHeaderBytes : 0;
  for (size_t left = 1 + below(4); left; --left) mutate_once(bytes, first);
  if (bytes.size() >= kHeaderBytes && below(16)) {
    uint32_t length = static_cast<uint32_t>(bytes.size()), checksum = 2166136261u;
    for (size_t i = kHeaderBytes; i < bytes.size(); ++i) checksum = (checksum ^ bytes[i]) * 16777619u;  // FNV-1a
    if (has_length) std::memcpy(&bytes[8], &length, 4);
    std::memcpy(&bytes[12], &checksum, 4);
  }
  bytes.shrink_to_fit();
  return bytes;
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("failed: %s\n", what);
  std::exit(3);
}

Bytes attention() {
  float scale = 0.125f;
  int32_t heads = 12, kv_heads = 4, seq = 512, tile = 64, masks = 1, rows = 8, full = 5, part = 7;
  const auto number = [](const char* name, int32_t& value) { return stof::Field{name, stof::Field::Kind::kInt, &value, 1}; };
  const auto text = [](const char* name, const char* value) {
    return stof::Field{name, stof::Field::Kind::kText, value, static_cast<int32_t>(std::strlen(value))};
  };
  const stof::Field fields[] = {{"scale", stof::Field::Kind::kFloat, &scale, 1}, number("num_heads", heads), number("num_kv_heads", kv_heads),
                                text("layout", "BSHD"), number("mask_seq_q", seq), number("mask_seq_kv", seq), number("tile_m", tile),
                                number("tile_n", tile), number("mask_n_masks", masks), number("mask_rows", rows), number("mask_cols", rows),
                                number("mask_n_full", full), number("mask_n_part", part), number("mask_max_row_tiles", rows),
                                text("kernel", "block_sm80")};
  stof::AttentionConfig config;
  require(!stof::read_fields(fields, static_cast<int32_t>(std::size(fields)), config, error, sizeof error), error);
  Bytes bytes(stof::kSerializedBytes);
  stof::serialize(config, bytes.data());
  return bytes;
}

std::vector<Bytes> regions(const std::string& program) {
  std::vector<Bytes> blobs;
  for (const auto id : {stof::RegionTemplate::kGemmEpilogue, stof::RegionTemplate::kGatedMlp, stof::RegionTemplate::kGemmNorm,
                        stof::RegionTemplate::kCubin}) {
    stof::RegionConfig config;
    config.template_id = id;
    if (id == stof::RegionTemplate::kGemmEpilogue) config.rotated_columns = 128, config.head_dim = 64;
    if (id == stof::RegionTemplate::kGemmNorm) config.epsilon = 1e-5f, config.has_scale = 1;
    if (id == stof::RegionTemplate::kCubin) config.program = program;
    blobs.push_back(stof::serialize(config));
  }
  return blobs;
}

bool try_attention(const Bytes& bytes) {
  stof::AttentionConfig config;
  if (stof::deserialize(bytes.data(), bytes.size(), config, error, sizeof error)) return false;
  Bytes again(stof::kSerializedBytes);
  stof::serialize(config, again.data());
  require(again == bytes, "an attention comes back as it was");
  char text[1024];
  stof::describe(config, text, 1 + below(sizeof text));
  return true;
}

bool try_region(const Bytes& bytes) {
  stof::RegionConfig config;
  if (stof::deserialize(bytes.data(), bytes.size(), config, error, sizeof error)) return false;
  require(stof::serialize(config) == bytes, "a region comes back as it was");
  require(!stof::describe(config).empty(), "a region describes itself");
  return true;
}

bool try_program(const Bytes& bytes) {
  std::string text(bytes.begin(), bytes.end());
  text.shrink_to_fit();
  stof::CubinProgram program;
  if (stof::parse_cubin_program(text, program, error, sizeof error)) return false;
  for (const auto& images : program.kernels)
    for (const auto& image : images)
      require(program.bytes.substr(image.offset, image.length).size() == image.length, "a cubin lies in the program");
  for (const auto& launch : program.launches) require(launch.kernel < program.kernels.size(), "a launch has a kernel");
  stof::TensorDesc inputs[stof::kMaxTensors] = {};
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    inputs[i].rank = program.inputs[i].rank;
    for (int32_t axis = 0; axis < inputs[i].rank; ++axis) inputs[i].dims[axis] = static_cast<int64_t>(below(3) ? below(5000) : rng());
  }
  int64_t values[stof::CubinProgram::kMaxNodes];
  stof::evaluate_nodes(program, inputs, values);
  return true;
}

}  // namespace

int main(int, char** argv) {
  rng.seed(std::strtoull(argv[1], nullptr, 10));
  const long count = std::atol(argv[2]);
  std::ifstream file(argv[3], std::ios::binary);
  const std::string program{std::istreambuf_iterator<char>(file), {}};
  const Bytes attention_blob = attention(), program_blob(program.begin(), program.end());
  const std::vector<Bytes> region_blobs = regions(program);
  require(try_attention(attention_blob) && try_program(program_blob), error);
  for (const Bytes& blob : region_blobs) require(try_region(blob), error);
  long accepted[3] = {};
  for (long i = 0; i < count; ++i) {
    accepted[0] += try_attention(mutated(attention_blob, false));
    accepted[1] += try_region(mutated(region_blobs[below(8) ? below(3) : 3], true));
    accepted[2] += try_program(mutated(program_blob, true));
  }
  std::printf("accepted %ld %ld %ld of %ld\n", accepted[0], accepted[1], accepted[2], count);
  return 0;
}
