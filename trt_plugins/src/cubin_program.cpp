#include "cubin_program.h"

#include <cstring>

#include "fail.h"

namespace stof {
namespace {

using Program = CubinProgram;

constexpr uint32_t kMagic = 0x50465453;  // "STFP"
constexpr uint32_t kFormat = 1;
constexpr size_t kHeaderBytes = 16;
constexpr uint32_t kMaxKernels = 64, kMaxImages = 16, kMaxLaunches = 64, kLongestName = 255, kMaxAlignment = 256;
constexpr uint32_t kMaxThreads = 1024, kMaxShared = 1 << 20;

uint32_t fnv1a(const char* bytes, size_t n) {
  uint32_t h = 2166136261u;
  for (size_t i = 0; i < n; ++i) h = (h ^ static_cast<unsigned char>(bytes[i])) * 16777619u;
  return h;
}

// Reads words and texts; after a read past the end everything is 0 and `ok` is false.
class Reader {
 public:
  Reader(const std::string& bytes, size_t at) : bytes_(bytes), at_(at) {}
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && at_ == bytes_.size(); }

  uint32_t word() {
    uint32_t w = 0;
    if (!take(4)) return 0;
    std::memcpy(&w, bytes_.data() + at_ - 4, 4);
    return w;
  }
  // A number of at most `most`; more counts as a failed read.
  uint32_t word(uint32_t most) {
    const uint32_t w = word();
    if (w > most) ok_ = false;
    return ok_ ? w : 0;
  }
  // A length, then as many bytes, padded to words. Their place.
  size_t blob(size_t& length) {
    length = word();
    const size_t place = at_;
    const bool fits = ok_ && take((length + 3) / 4 * 4);
    if (!fits) length = 0;
    return fits ? place : 0;
  }

 private:
  bool take(size_t n) {
    if (!ok_ || n > bytes_.size() - at_) return ok_ = false;
    at_ += n;
    return true;
  }
  const std::string& bytes_;
  size_t at_;
  bool ok_ = true;
};

template <class T>
T read(const char* bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes + at, sizeof value);
  return value;
}

// Whether `length` bytes are a 64-bit little-endian CUDA ELF file all of whose headers and sections lie inside. The driver
// gets a pointer only and believes what the headers say.
bool elf_fits(const char* elf, size_t length) {
  constexpr size_t kHeader = 64, kSection = 64, kSegment = 56;
  constexpr uint16_t kCuda = 190;
  constexpr uint32_t kNoBits = 8;
  if (length < kHeader || std::memcmp(elf, "\177ELF\2\1", 6) != 0 || read<uint16_t>(elf, 18) != kCuda) return false;
  const auto inside = [length](uint64_t offset, uint64_t size) { return offset <= length && size <= length - offset; };
  const uint64_t segments = read<uint64_t>(elf, 32), sections = read<uint64_t>(elf, 40);
  const uint16_t segment_size = read<uint16_t>(elf, 54), segment_count = read<uint16_t>(elf, 56);
  const uint16_t section_size = read<uint16_t>(elf, 58), section_count = read<uint16_t>(elf, 60);
  const uint16_t names = read<uint16_t>(elf, 62);
  if (segment_count && (segment_size != kSegment || !inside(segments, uint64_t{segment_count} * kSegment))) return false;
  if (!section_count || section_size != kSection || !inside(sections, uint64_t{section_count} * kSection)) return false;
  if (names >= section_count) return false;
  for (uint16_t i = 0; i < segment_count; ++i) {
    const size_t at = segments + size_t{i} * kSegment;
    if (!inside(read<uint64_t>(elf, at + 8), read<uint64_t>(elf, at + 32))) return false;
  }
  const size_t names_at = sections + size_t{names} * kSection;
  const uint64_t names_offset = read<uint64_t>(elf, names_at + 24), names_size = read<uint64_t>(elf, names_at + 32);
  if (names_size == 0 || !inside(names_offset, names_size) || elf[names_offset + names_size - 1] != 0) return false;
  for (uint16_t i = 0; i < section_count; ++i) {
    const size_t at = sections + size_t{i} * kSection;
    if (read<uint32_t>(elf, at) >= names_size) return false;
    if (read<uint32_t>(elf, at + 4) != kNoBits && !inside(read<uint64_t>(elf, at + 24), read<uint64_t>(elf, at + 32))) return false;
  }
  return true;
}

bool is_identifier(const std::string& name) {
  for (const char c : name)
    if (c <= ' ' || c > '~') return false;
  return !name.empty() && name.size() <= kLongestName;
}

const char* read_nodes(Reader& in, const Program& program, std::vector<Program::Node>& nodes, char* error, size_t size) {
  const uint32_t count = in.word(Program::kMaxNodes);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    const uint32_t op = in.word(static_cast<uint32_t>(Program::Op::kMin)), left = in.word(), right = in.word();
    const Program::Node node{static_cast<Program::Op>(op), left, right};
    if (node.op > Program::Op::kSize && (left >= i || right >= i))
      return fail(error, size, "expression %u of the program refers to a later one", i);
    nodes.push_back(node);
  }
  static_cast<void>(program);
  return nullptr;
}

const char* read_tensors(Reader& in, const Program& program, bool free_sizes, std::vector<Program::Tensor>& tensors, char* error,
                         size_t size) {
  constexpr ElementType kTypes[] = {ElementType::kF16, ElementType::kBF16, ElementType::kF32, ElementType::kI32};
  const uint32_t count = in.word(kMaxTensors);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    Program::Tensor t{kTypes[in.word(3)], static_cast<int32_t>(in.word(8)), {}};
    for (int32_t axis = 0; axis < t.rank; ++axis) {
      t.dims[axis] = in.word();
      if (t.dims[axis] >= program.nodes.size() && !(free_sizes && t.dims[axis] == Program::kNone))
        return fail(error, size, "a size of the program's tensor %u is no expression", i);
    }
    tensors.push_back(t);
  }
  return nullptr;
}

const char* read_kernels(Reader& in, Program& program, char* error, size_t size) {
  const uint32_t kernels = in.word(kMaxKernels);
  for (uint32_t k = 0; k < kernels && in.ok(); ++k) {
    const uint32_t images = in.word(kMaxImages);
    if (in.ok() && images == 0) return fail(error, size, "kernel %u of the program has no code", k);
    program.kernels.emplace_back();
    for (uint32_t i = 0; i < images && in.ok(); ++i) {
      Program::Image image{};
      image.arch = static_cast<int32_t>(in.word(999));
      image.threads = static_cast<int32_t>(in.word(kMaxThreads));
      image.shared = static_cast<int32_t>(in.word(kMaxShared));
      image.hidden = static_cast<int32_t>(in.word(Program::kMaxHidden));
      size_t name_length = 0;
      const size_t name = in.blob(name_length);
      image.name.assign(program.bytes, name, name_length);
      image.offset = in.blob(image.length);
      if (!in.ok()) break;
      if (image.arch < 50 || image.threads < 1 || image.threads % 32 || !is_identifier(image.name))
        return fail(error, size, "kernel %u of the program has an unusable description", k);
      if (!elf_fits(program.bytes.data() + image.offset, image.length))
        return fail(error, size, "kernel %u of the program is no whole cubin", k);
      program.kernels.back().push_back(image);
    }
  }
  return nullptr;
}

bool arg_fits(const Program& program, const Program::Arg& arg) {
  switch (arg.kind) {
    case Program::ArgKind::kInput: return arg.value < program.inputs.size();
    case Program::ArgKind::kOutput: return arg.value < program.outputs.size();
    case Program::ArgKind::kFloat32: return true;
    default: return arg.value < program.nodes.size();
  }
}

const char* read_launches(Reader& in, Program& program, char* error, size_t size) {
  const uint32_t launches = in.word(kMaxLaunches);
  for (uint32_t l = 0; l < launches && in.ok(); ++l) {
    Program::Launch launch{in.word(), in.word(), in.word(kMaxAlignment), {in.word(), in.word(), in.word()}, {}};
    const uint32_t args = in.word(Program::kMaxArgs);
    for (uint32_t a = 0; a < args && in.ok(); ++a) {
      const Program::ArgKind kind = static_cast<Program::ArgKind>(in.word(static_cast<uint32_t>(Program::ArgKind::kFloat32)));
      const Program::Arg arg{kind, in.word()};
      if (in.ok() && !arg_fits(program, arg)) return fail(error, size, "argument %u of launch %u leads nowhere", a, l);
      launch.args.push_back(arg);
    }
    if (!in.ok()) break;
    const bool power = launch.alignment && (launch.alignment & (launch.alignment - 1)) == 0;
    if (launch.kernel >= program.kernels.size() || !power ||
        (launch.fallback != Program::kNone && launch.fallback >= program.kernels.size()))
      return fail(error, size, "launch %u of the program has no kernel", l);
    for (const uint32_t axis : launch.grid)
      if (axis >= program.nodes.size()) return fail(error, size, "the grid of launch %u is no expression", l);
    program.launches.push_back(std::move(launch));
  }
  return nullptr;
}

// The sizes that expressions read have to exist.
const char* check_nodes(const Program& program, char* error, size_t size) {
  for (const Program::Node& node : program.nodes) {
    if (node.op != Program::Op::kSize) continue;
    if (node.left >= program.inputs.size() || node.right >= static_cast<uint32_t>(program.inputs[node.left].rank))
      return fail(error, size, "an expression of the program reads axis %u of input %u, which does not exist", node.right, node.left);
  }
  return nullptr;
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }  // b > 0

}  // namespace

const char* parse_cubin_program(const std::string& bytes, CubinProgram& program, char* error, size_t error_size) {
  program = CubinProgram();
  if (bytes.size() < kHeaderBytes) return fail(error, error_size, "the program has %zu bytes, which is too short", bytes.size());
  const uint32_t magic = read<uint32_t>(bytes.data(), 0), format = read<uint32_t>(bytes.data(), 4);
  const uint32_t length = read<uint32_t>(bytes.data(), 8), checksum = read<uint32_t>(bytes.data(), 12);
  if (magic != kMagic) return fail(error, error_size, "the program does not start with its mark");
  if (format != kFormat) return fail(error, error_size, "the program has format %u, this library reads %u", format, kFormat);
  if (length != bytes.size()) return fail(error, error_size, "the program has %zu bytes, %u are expected", bytes.size(), length);
  if (checksum != fnv1a(bytes.data() + kHeaderBytes, bytes.size() - kHeaderBytes))
    return fail(error, error_size, "the program is damaged (checksum)");
  program.bytes = bytes;
  Reader in(program.bytes, kHeaderBytes);
  const char* why = read_nodes(in, program, program.nodes, error, error_size);
  if (!why) why = read_tensors(in, program, true, program.inputs, error, error_size);
  if (!why) why = read_tensors(in, program, false, program.outputs, error, error_size);
  if (!why) why = check_nodes(program, error, error_size);
  program.workspace = in.word();
  if (!why) why = read_kernels(in, program, error, error_size);
  if (!why && in.ok()) why = read_launches(in, program, error, error_size);
  if (why) return why;
  if (!in.at_end()) return fail(error, error_size, "the program's parts do not fit its length, or a number is too large");
  if (program.outputs.empty() || program.inputs.empty() || program.inputs.size() + program.outputs.size() > kMaxTensors)
    return fail(error, error_size, "the program has %zu inputs and %zu outputs", program.inputs.size(), program.outputs.size());
  if (program.workspace >= program.nodes.size()) return fail(error, error_size, "the program's workspace is no expression");
  if (program.launches.empty()) return fail(error, error_size, "the program launches nothing");
  return nullptr;
}

bool evaluate_nodes(const CubinProgram& program, const TensorDesc* inputs, int64_t (&values)[CubinProgram::kMaxNodes]) {
  for (size_t i = 0; i < program.nodes.size(); ++i) {
    const Program::Node& node = program.nodes[i];
    int64_t& value = values[i];
    if (node.op == Program::Op::kConstant) {
      value = node.constant();
      continue;
    }
    if (node.op == Program::Op::kSize) {
      value = inputs[node.left].dims[node.right];
      continue;
    }
    const int64_t a = values[node.left], b = values[node.right];
    const bool division = node.op == Program::Op::kFloorDiv || node.op == Program::Op::kCeilDiv;
    if (division && b <= 0) return false;
    bool overflow = false;
    switch (node.op) {
      case Program::Op::kSum: overflow = __builtin_add_overflow(a, b, &value); break;
      case Program::Op::kSub: overflow = __builtin_sub_overflow(a, b, &value); break;
      case Program::Op::kProd: overflow = __builtin_mul_overflow(a, b, &value); break;
      case Program::Op::kFloorDiv: value = floor_div(a, b); break;
      case Program::Op::kCeilDiv: value = floor_div(a, b) + (a % b != 0); break;
      case Program::Op::kMax: value = a > b ? a : b; break;
      default: value = a < b ? a : b; break;
    }
    if (overflow) return false;
  }
  return true;
}

const CubinProgram::Image* pick_image(const std::vector<CubinProgram::Image>& images, int32_t major, int32_t minor) {
  const int32_t here = 10 * major + minor;
  const CubinProgram::Image* best = nullptr;
  for (const CubinProgram::Image& image : images) {
    const bool runs = image.arch == here || (major == 8 && image.arch >= 80 && image.arch <= here);
    if (runs && (!best || image.arch > best->arch)) best = &image;
  }
  return best;
}

}  // namespace stof
