#include "cubin_region.h"

#include <iterator>
#include <mutex>
#include <vector>

#include "cubin_module.h"
#include "cubin_program.h"
#include "fail.h"

namespace stof {
namespace {

using Program = CubinProgram;

constexpr int64_t kMostGrid[3] = {INT32_MAX, 65535, 65535};
constexpr int64_t kMostWorkspace = int64_t{1} << 40;

struct LoadedKernel {
  std::shared_ptr<CubinModule> module;
  CUfunction function;
  const Program::Image* image;
};

// The program's kernels in one CUDA context.
struct Prepared {
  CUcontext context;
  std::vector<LoadedKernel> kernels;
};

size_t arg_bytes(Program::ArgKind kind) {
  return kind == Program::ArgKind::kInt32 || kind == Program::ArgKind::kFloat32 ? 4 : 8;
}

// The driver reads as many parameters as the kernel has: they must be what the launch gives.
const char* check_parameters(const Driver& driver, const LoadedKernel& kernel, const Program::Launch& launch, char* error,
                             size_t size) {
  if (!driver.func_get_param_info) return nullptr;
  const size_t given = launch.args.size() + static_cast<size_t>(kernel.image->hidden);
  for (size_t i = 0; i <= given; ++i) {
    size_t offset = 0, bytes = 0;
    const bool there = driver.func_get_param_info(kernel.function, i, &offset, &bytes) == CUDA_SUCCESS;
    const size_t wanted = i < launch.args.size() ? arg_bytes(launch.args[i].kind) : 8;
    if (there != (i < given) || (there && bytes != wanted))
      return fail(error, size, "kernel %s has other parameters than the program says", kernel.image->name.c_str());
  }
  return nullptr;
}

const char* load_kernel(const Driver& driver, CUcontext context, const Program& program, const Program::Image& image,
                        LoadedKernel& kernel, char* error, size_t size) {
  kernel.image = &image;
  kernel.module = load_cubin(driver, context, program.bytes.data() + image.offset, image.length, error, size);
  if (!kernel.module) return error;
  CUresult status = driver.module_get_function(&kernel.function, kernel.module->get(), image.name.c_str());
  // Asking also loads it, where the driver loads lazily: not during an enqueue that is being captured.
  int threads = 0;
  if (status == CUDA_SUCCESS)
    status = driver.func_get_attribute(&threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel.function);
  if (status == CUDA_SUCCESS && threads < image.threads)
    return fail(error, size, "kernel %s runs with %d threads at most, not %d", image.name.c_str(), threads, image.threads);
  if (status == CUDA_SUCCESS && image.shared > 48 << 10)
    status = driver.func_set_attribute(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, image.shared);
  return status == CUDA_SUCCESS
             ? nullptr
             : fail(error, size, "kernel %s can not be used: %s", image.name.c_str(), driver.name_of(status));
}

// What a launch at given shapes needs, all checked.
struct Plan {
  int64_t values[Program::kMaxNodes];
};

class CubinRegion final : public RegionCore {
 public:
  const char* parse(const std::string& bytes, char* error, size_t size) {
    return parse_cubin_program(bytes, program_, error, size);
  }

  int32_t num_inputs() const override { return static_cast<int32_t>(program_.inputs.size()); }
  int32_t num_outputs() const override { return static_cast<int32_t>(program_.outputs.size()); }
  // Where TensorRT chooses precisions itself, a network of float32 tensors may run in fp16: an output is declared as what
  // an input of its type is declared as, and `supports` says what it is.
  ElementType output_type(int32_t output, const ElementType* inputs) const override {
    if (output < 0 || output >= num_outputs()) return ElementType::kOther;
    const ElementType type = program_.outputs[output].type;
    for (int32_t i = 0; i < num_inputs(); ++i)
      if (program_.inputs[i].type == type) return inputs[i];
    return type;
  }

  bool output_dims(int32_t output, DimBuilder& builder, OutputDims& dims) const override {
    if (output < 0 || output >= num_outputs()) return false;
    for (int32_t i = 0; i < num_inputs(); ++i)
      if (builder.rank(i) != program_.inputs[i].rank) return false;
    // Only what this output needs: TensorRT would evaluate all it is given.
    DimBuilder::Dim built[Program::kMaxNodes] = {};
    const Program::Tensor& tensor = program_.outputs[output];
    dims.rank = tensor.rank;
    for (int32_t axis = 0; axis < tensor.rank; ++axis)
      if (!(dims.dims[axis] = build(tensor.dims[axis], builder, built))) return false;
    return true;
  }

  bool supports(int32_t pos, const TensorDesc* tensors) const override {
    if (pos < 0 || pos >= num_inputs() + num_outputs()) return false;
    const Program::Tensor& wanted = pos < num_inputs() ? program_.inputs[pos] : program_.outputs[pos - num_inputs()];
    return tensors[pos].type == wanted.type && tensors[pos].rank == wanted.rank;
  }

  const char* check(const TensorDesc* inputs, int32_t n, size_t& workspace_bytes, char* error, size_t size) const override {
    Plan plan;
    const char* const why = make_plan(inputs, n, plan, error, size);
    if (!why) workspace_bytes = static_cast<size_t>(plan.values[program_.workspace]);
    return why;
  }

  const char* refused_here(char* error, size_t size) const override {
    int32_t device = 0, major = 0, minor = 0;
    if (!here(device, major, minor)) return nullptr;
    for (const auto& images : program_.kernels) {
      if (pick_image(images, major, minor)) continue;
      return fail(error, size, "the program has no code for this GPU (compute capability %d.%d), but for %d.%d: compile it for this one",
                  major, minor, images[0].arch / 10, images[0].arch % 10);
    }
    return nullptr;
  }

  const char* prepare(char* error, size_t size) override {
    cudaFree(nullptr);  // makes the device's context current in a thread that has none
    cudaGetLastError();
    std::shared_ptr<const Prepared> prepared;
    return find_or_load(prepared, error, size);
  }

  const char* enqueue(const TensorDesc* inputs, int32_t n, const void* const* in, void* const* out, void* workspace,
                      cudaStream_t stream, char* error, size_t size) const override {
    Plan plan;
    if (const char* const why = make_plan(inputs, n, plan, error, size)) return why;
    std::shared_ptr<const Prepared> prepared;  // there already, unless `prepare` was left out
    if (const char* const why = find_or_load(prepared, error, size)) return why;
    const Driver& driver = *load_driver(error, size);
    for (const Program::Launch& launch : program_.launches)
      if (const char* const why = start(driver, *prepared, launch, plan, in, out, workspace, stream, error, size)) return why;
    return nullptr;
  }

 private:
  static bool here(int32_t& device, int32_t& major, int32_t& minor) {
    const bool found = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    if (!found) cudaGetLastError();
    return found;
  }

  // Nodes refer to earlier ones, so that this ends.
  DimBuilder::Dim build(uint32_t index, DimBuilder& builder, DimBuilder::Dim (&built)[Program::kMaxNodes]) const {
    if (built[index]) return built[index];
    const Program::Node& node = program_.nodes[index];
    if (node.op == Program::Op::kConstant) return built[index] = builder.constant(node.constant());
    if (node.op == Program::Op::kSize)
      return built[index] = builder.input(static_cast<int32_t>(node.left), static_cast<int32_t>(node.right));
    constexpr DimBuilder::Op kOps[] = {DimBuilder::Op::kSum,      DimBuilder::Op::kSub, DimBuilder::Op::kProd, DimBuilder::Op::kFloorDiv,
                                       DimBuilder::Op::kCeilDiv, DimBuilder::Op::kMax, DimBuilder::Op::kMin};
    const DimBuilder::Dim left = build(node.left, builder, built), right = build(node.right, builder, built);
    if (!left || !right) return nullptr;
    const auto op = static_cast<uint32_t>(node.op) - static_cast<uint32_t>(Program::Op::kSum);
    return built[index] = builder.operation(kOps[op], left, right);
  }

  const char* make_plan(const TensorDesc* inputs, int32_t n, Plan& plan, char* error, size_t size) const {
    if (n != num_inputs()) return fail(error, size, "%d inputs instead of %d", n, num_inputs());
    for (int32_t i = 0; i < n; ++i) {
      if (inputs[i].type != program_.inputs[i].type) return fail(error, size, "input %d has another type than the program's", i);
      if (inputs[i].rank != program_.inputs[i].rank)
        return fail(error, size, "input %d has rank %d instead of %d", i, inputs[i].rank, program_.inputs[i].rank);
    }
    if (!evaluate_nodes(program_, inputs, plan.values)) return fail(error, size, "the inputs are too large: sizes overflow (or divide by 0)");
    for (int32_t i = 0; i < n; ++i)
      for (int32_t axis = 0; axis < inputs[i].rank; ++axis) {
        const int64_t found = inputs[i].dims[axis];
        const uint32_t node = program_.inputs[i].dims[axis];
        const int64_t wanted = node == Program::kNone ? found : plan.values[node];
        if (found < 0 || found != wanted)
          return fail(error, size, "axis %d of input %d is %lld instead of %lld", axis, i, static_cast<long long>(found),
                      static_cast<long long>(wanted));
      }
    for (const Program::Tensor& tensor : program_.outputs)
      for (int32_t axis = 0; axis < tensor.rank; ++axis)
        if (plan.values[tensor.dims[axis]] < 0) return fail(error, size, "an output of the program has a negative size");
    const int64_t workspace = plan.values[program_.workspace];
    if (workspace < 0 || workspace > kMostWorkspace) return fail(error, size, "the program asks for an impossible workspace");
    return check_launches(plan, workspace, error, size);
  }

  const char* check_launches(const Plan& plan, int64_t workspace, char* error, size_t size) const {
    for (const Program::Launch& launch : program_.launches) {
      for (int32_t axis = 0; axis < 3; ++axis) {
        const int64_t blocks = plan.values[launch.grid[axis]];
        if (blocks < 0 || blocks > kMostGrid[axis])
          return fail(error, size, "the program needs %lld thread blocks: the inputs are too large", static_cast<long long>(blocks));
      }
      for (const Program::Arg& arg : launch.args) {
        const int64_t value = arg.value < program_.nodes.size() ? plan.values[arg.value] : 0;
        if (arg.kind == Program::ArgKind::kInt32 && (value < INT32_MIN || value > INT32_MAX))
          return fail(error, size, "the inputs are too large: %lld does not fit 32 bits", static_cast<long long>(value));
        if (arg.kind == Program::ArgKind::kWorkspace && (value < 0 || value > workspace))
          return fail(error, size, "the program reaches outside its workspace");
      }
    }
    return nullptr;
  }

  const char* find_or_load(std::shared_ptr<const Prepared>& prepared, char* error, size_t size) const {
    const Driver* const driver = load_driver(error, size);
    if (!driver) return error;
    CUcontext context = nullptr;
    if (driver->ctx_get_current(&context) != CUDA_SUCCESS || !context) return fail(error, size, "no CUDA context is current");
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& there : prepared_)
      if (there->context == context) {
        prepared = there;
        return nullptr;
      }
    try {
      auto made = std::make_shared<Prepared>();
      made->context = context;
      const char* const why = load(*driver, *made, error, size);
      if (why) return why;
      prepared_.push_back(made);
      prepared = std::move(made);
      return nullptr;
    } catch (...) {
      return fail(error, size, "out of memory");
    }
  }

  const char* load(const Driver& driver, Prepared& prepared, char* error, size_t size) const {
    int32_t device = 0, major = 0, minor = 0;
    if (!here(device, major, minor)) return fail(error, size, "there is no GPU");
    if (const char* const why = refused_here(error, size)) return why;
    prepared.kernels.resize(program_.kernels.size());
    for (size_t k = 0; k < program_.kernels.size(); ++k) {
      const Program::Image& image = *pick_image(program_.kernels[k], major, minor);
      if (const char* const why = load_kernel(driver, prepared.context, program_, image, prepared.kernels[k], error, size)) return why;
    }
    for (const Program::Launch& launch : program_.launches)
      for (const uint32_t k : {launch.kernel, launch.fallback}) {
        if (k == Program::kNone) continue;
        if (const char* const why = check_parameters(driver, prepared.kernels[k], launch, error, size)) return why;
      }
    return nullptr;
  }

  const char* start(const Driver& driver, const Prepared& prepared, const Program::Launch& launch, const Plan& plan,
                    const void* const* in, void* const* out, void* workspace, cudaStream_t stream, char* error,
                    size_t size) const {
    union Value {
      const void* pointer;
      int64_t wide;
      int32_t narrow;
      uint32_t bits;
    };
    Value values[Program::kMaxArgs + Program::kMaxHidden] = {};  // parameters the compiler appended are null
    void* parameters[Program::kMaxArgs + Program::kMaxHidden];
    for (size_t i = 0; i < std::size(values); ++i) parameters[i] = &values[i];
    bool aligned = true;
    for (size_t i = 0; i < launch.args.size(); ++i) {
      const Program::Arg& arg = launch.args[i];
      Value& value = values[i];
      switch (arg.kind) {
        case Program::ArgKind::kInput: value.pointer = in[arg.value]; break;
        case Program::ArgKind::kOutput: value.pointer = out[arg.value]; break;
        case Program::ArgKind::kWorkspace: value.pointer = static_cast<char*>(workspace) + plan.values[arg.value]; break;
        case Program::ArgKind::kInt32: value.narrow = static_cast<int32_t>(plan.values[arg.value]); continue;
        case Program::ArgKind::kInt64: value.wide = plan.values[arg.value]; continue;
        case Program::ArgKind::kFloat32: value.bits = arg.value; continue;
      }
      aligned = aligned && reinterpret_cast<uintptr_t>(value.pointer) % launch.alignment == 0;
    }
    if (!aligned && launch.fallback == Program::kNone)
      return fail(error, size, "a tensor's address is not a multiple of %u, and the program has no kernel for that", launch.alignment);
    const LoadedKernel& kernel = prepared.kernels[aligned ? launch.kernel : launch.fallback];
    unsigned grid[3];
    for (int32_t axis = 0; axis < 3; ++axis) grid[axis] = static_cast<unsigned>(plan.values[launch.grid[axis]]);
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return nullptr;
    const CUresult status =
        driver.launch_kernel(kernel.function, grid[0], grid[1], grid[2], static_cast<unsigned>(kernel.image->threads), 1, 1,
                             static_cast<unsigned>(kernel.image->shared), stream, parameters, nullptr);
    return status == CUDA_SUCCESS ? nullptr
                                  : fail(error, size, "kernel %s does not start: %s", kernel.image->name.c_str(), driver.name_of(status));
  }

  CubinProgram program_;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const Prepared>> prepared_;  // one for each CUDA context
};

}  // namespace

std::unique_ptr<RegionCore> make_cubin_region(const RegionConfig& config, char* error, size_t error_size) {
  auto region = std::make_unique<CubinRegion>();
  if (region->parse(config.program, error, error_size)) return nullptr;
  return region;
}

}  // namespace stof
