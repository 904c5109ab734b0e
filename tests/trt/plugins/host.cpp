// Drives a plugin library as TensorRT does, behind a C face for ctypes (host.py). No GPU, no libnvinfer.
// HOST_V2: a library of IPluginV2DynamicExt; else of IPluginV3.
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "NvInfer.h"

using namespace nvinfer1;

namespace {

struct Logger final : ILogger, ILoggerFinder {
  std::string text;
  void log(Severity, AsciiChar const* message) noexcept override { text += std::string(message) + "\n"; }
  ILogger* findLogger() override { return this; }
};
Logger g_logger;

using Number = decltype(Dims::d[0] + 0);  // int32_t in TensorRT 8, int64_t later
constexpr int64_t kPoison = -7654321;     // what reading the value of a dimension that is not constant yields

// A dimension that is a constant or known at run time only, with the value it has in this run.
struct Expr final : IDimensionExpr {
  struct Impl final : apiv::VDimensionExpr {
    bool constant;
    int64_t value;
    bool isConstant() const override { return constant; }
    std::remove_const_t<Number> getConstantValue() const override { return constant ? value : kPoison; }
#if NV_TENSORRT_MAJOR >= 10
    bool isSizeTensor() const override { return false; }
#endif
  } impl;
  Expr(bool constant, int64_t value) {
    impl.constant = constant;
    impl.value = value;
    mImpl = &impl;
  }
};

struct Builder final : IExprBuilder {
  struct Impl final : apiv::VExprBuilder {
    std::vector<std::unique_ptr<Expr>> made;
    IDimensionExpr const* make(bool constant, int64_t value) {
      made.push_back(std::make_unique<Expr>(constant, value));
      return made.back().get();
    }
    IDimensionExpr const* constant(std::remove_const_t<Number> value) override { return make(true, value); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& x, IDimensionExpr const& y) override {
      const Expr::Impl &a = static_cast<Expr const&>(x).impl, &b = static_cast<Expr const&>(y).impl;
      const bool constant = a.constant && b.constant;
      switch (op) {
        case DimensionOperation::kPROD: return make(constant, a.value * b.value);
        case DimensionOperation::kFLOOR_DIV: return make(constant, a.value / b.value);
        case DimensionOperation::kCEIL_DIV: return make(constant, (a.value + b.value - 1) / b.value);
        case DimensionOperation::kSUM: return make(constant, a.value + b.value);
        case DimensionOperation::kSUB: return make(constant, a.value - b.value);
        case DimensionOperation::kMAX: return make(constant, a.value > b.value ? a.value : b.value);
        case DimensionOperation::kMIN: return make(constant, a.value < b.value ? a.value : b.value);
        default: return make(constant, kPoison);
      }
    }
#if NV_TENSORRT_MAJOR >= 10
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override { return nullptr; }
#endif
  } impl;
  Builder() { mImpl = &impl; }
};

}  // namespace

extern "C" {

struct HostField {
  const char* name;
  int32_t type;  // PluginFieldType
  const void* data;
  int32_t length;
};
struct HostTensor {
  int32_t type, format, rank;  // DataType; TensorFormat
  int64_t dims[8];
  int32_t dynamic[8];  // host_output_shapes: the value is known at run time only
};

}  // extern "C"

namespace {

Dims dims_of(const HostTensor& t) {
  Dims d{};
  d.nbDims = t.rank;
  for (int32_t i = 0; i < t.rank; ++i) d.d[i] = t.dims[i];
  return d;
}
std::vector<PluginTensorDesc> descs(const HostTensor* t, int32_t n) {
  std::vector<PluginTensorDesc> result;
  for (int32_t i = 0; i < n; ++i)
    result.push_back({dims_of(t[i]), static_cast<DataType>(t[i].type), static_cast<TensorFormat>(t[i].format), 1.f});
  return result;
}
std::vector<DynamicPluginTensorDesc> dynamic_descs(const HostTensor* t, int32_t n) {
  std::vector<DynamicPluginTensorDesc> result;
  for (const PluginTensorDesc& desc : descs(t, n)) {
    DynamicPluginTensorDesc d{};
    d.desc = desc;
    for (int32_t i = 0; i < desc.dims.nbDims; ++i) d.desc.dims.d[i] = -1;  // as where a dimension is dynamic
    d.min = d.max = desc.dims;
    for (int32_t i = 0; i < desc.dims.nbDims; ++i) d.min.d[i] = 1;
    result.push_back(d);
  }
  return result;
}
PluginFieldCollection collect(const HostField* fields, int32_t n, std::vector<PluginField>& store) {
  for (int32_t i = 0; i < n; ++i)
    store.emplace_back(fields[i].name, fields[i].data, static_cast<PluginFieldType>(fields[i].type), fields[i].length);
  return {n, store.data()};
}

#ifdef HOST_V2
using Creator = IPluginCreator;
using Plugin = IPluginV2DynamicExt;
constexpr char kEntry[] = "getPluginCreators";
#else
using Creator = IPluginCreatorInterface;
using Plugin = IPluginV3;
constexpr char kEntry[] = "getCreators";
template <class T>
T* as(Plugin* p, PluginCapabilityType type) {
  return static_cast<T*>(p->getCapabilityInterface(type));
}
IPluginV3OneCore* core(Plugin* p) { return as<IPluginV3OneCore>(p, PluginCapabilityType::kCORE); }
IPluginV3OneBuild* build(Plugin* p) { return as<IPluginV3OneBuild>(p, PluginCapabilityType::kBUILD); }
IPluginV3OneRuntime* runtime(Plugin* p) { return as<IPluginV3OneRuntime>(p, PluginCapabilityType::kRUNTIME); }
IPluginCreatorV3One* one(void* creator) {
  return static_cast<IPluginCreatorV3One*>(static_cast<IPluginCreatorInterface*>(creator));
}
#endif

Plugin* plugin(void* p) { return static_cast<Plugin*>(p); }

}  // namespace

extern "C" {

// The messages since the last call.
const char* host_log() {
  static std::string last;
  last.swap(g_logger.text);
  g_logger.text.clear();
  return last.c_str();
}

// The creator of a plugin in a library; null where it has none of this name, or several.
void* host_load(const char* path, const char* name) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    g_logger.text = dlerror();
    return nullptr;
  }
  const auto entry = reinterpret_cast<Creator* const* (*)(int32_t&)>(dlsym(library, kEntry));
  const auto finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
  if (!entry || !finder) return nullptr;
  finder(&g_logger);
  int32_t count = 0;
  Creator* const* const creators = entry(count);
  void* found = nullptr;
  for (int32_t i = 0; i < count; ++i) {
#ifdef HOST_V2
    const bool named = std::strcmp(creators[i]->getPluginName(), name) == 0;
#else
    const bool named = std::strcmp(one(creators[i])->getPluginName(), name) == 0;
#endif
    if (named && found) return nullptr;
    if (named) found = creators[i];
  }
  return found;
}

// "name version namespace field:type:length ...".
const char* host_describe(void* creator) {
  static std::string text;
#ifdef HOST_V2
  auto* const c = static_cast<IPluginCreator*>(creator);
#else
  auto* const c = one(creator);
#endif
  text = std::string(c->getPluginName()) + " " + c->getPluginVersion() + " " + c->getPluginNamespace();
  const PluginFieldCollection* const fields = c->getFieldNames();
  for (int32_t i = 0; i < fields->nbFields; ++i)
    text += std::string(" ") + fields->fields[i].name + ":" + std::to_string(static_cast<int32_t>(fields->fields[i].type)) + ":" +
            std::to_string(fields->fields[i].length);
  return text.c_str();
}

void* host_create(void* creator, const HostField* fields, int32_t n) {
  std::vector<PluginField> store;
  const PluginFieldCollection collection = collect(fields, n, store);
#ifdef HOST_V2
  return static_cast<Plugin*>(static_cast<IPluginCreator*>(creator)->createPlugin("node", &collection));
#else
  return one(creator)->createPlugin("node", &collection, TensorRTPhase::kBUILD);
#endif
}

void* host_deserialize(void* creator, const void* bytes, int64_t length) {
#ifdef HOST_V2
  // What stands in for a damaged plugin has nothing to serialize and does not initialize: TensorRT refuses the engine.
  auto* const plugin = static_cast<Plugin*>(static_cast<IPluginCreator*>(creator)->deserializePlugin("node", bytes, length));
  if (!plugin || plugin->getSerializationSize() > 0 || plugin->initialize() == 0) return plugin;
  plugin->destroy();
  return nullptr;
#else
  const PluginField field("stof_config", bytes, PluginFieldType::kUNKNOWN, static_cast<int32_t>(length));
  const PluginFieldCollection collection{1, &field};
  return one(creator)->createPlugin("node", &collection, TensorRTPhase::kRUNTIME);
#endif
}

// Bytes written, of at most `room`; -1 where the plugin does not serialise to one field of bytes.
int64_t host_serialize(void* p, void* bytes, int64_t room) {
#ifdef HOST_V2
  const int64_t length = static_cast<int64_t>(plugin(p)->getSerializationSize());
  if (length <= room) plugin(p)->serialize(bytes);
  return length;
#else
  const PluginFieldCollection* const fields = runtime(plugin(p))->getFieldsToSerialize();
  if (fields->nbFields != 1 || std::strcmp(fields->fields[0].name, "stof_config") != 0 ||
      fields->fields[0].type != PluginFieldType::kUNKNOWN || fields->fields[0].length > room)
    return -1;
  std::memcpy(bytes, fields->fields[0].data, static_cast<size_t>(fields->fields[0].length));
  return fields->fields[0].length;
#endif
}

void* host_clone(void* p) { return static_cast<Plugin*>(plugin(p)->clone()); }

// V3: the context's own plugin.
void* host_attach(void* p) {
#ifdef HOST_V2
  return host_clone(p);
#else
  return runtime(plugin(p))->attachToContext(nullptr);
#endif
}

void host_destroy(void* p) {
#ifdef HOST_V2
  plugin(p)->destroy();
#else
  delete plugin(p);
#endif
}

// "name version namespace outputs", as the plugin itself says them.
const char* host_identity(void* p) {
  static std::string text;
#ifdef HOST_V2
  plugin(p)->setPluginNamespace(nullptr);
  text = std::string(plugin(p)->getPluginType()) + " " + plugin(p)->getPluginVersion() + " " + plugin(p)->getPluginNamespace() +
         " " + std::to_string(plugin(p)->getNbOutputs());
#else
  IPluginV3OneCore* const c = core(plugin(p));
  text = std::string(c->getPluginName()) + " " + c->getPluginVersion() + " " + c->getPluginNamespace() + " " +
         std::to_string(build(plugin(p))->getNbOutputs());
#endif
  return text.c_str();
}

// Shapes of the outputs (rank, dims, dynamic filled). -1: refused.
int32_t host_output_shapes(void* p, const HostTensor* in, int32_t n, HostTensor* out, int32_t outputs) {
  Builder builder;
  std::vector<DimsExprs> exprs(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) {
    exprs[i].nbDims = in[i].rank;
    for (int32_t k = 0; k < in[i].rank; ++k) exprs[i].d[k] = builder.impl.make(!in[i].dynamic[k], in[i].dims[k]);
  }
  std::vector<DimsExprs> results(static_cast<size_t>(outputs));
#ifdef HOST_V2
  for (int32_t i = 0; i < outputs; ++i) results[i] = plugin(p)->getOutputDimensions(i, exprs.data(), n, builder);
#else
  if (build(plugin(p))->getOutputShapes(exprs.data(), n, nullptr, 0, results.data(), outputs, builder) != 0) return -1;
#endif
  for (int32_t i = 0; i < outputs; ++i) {
    out[i].rank = results[i].nbDims;
    if (out[i].rank < 0) return -1;
    for (int32_t k = 0; k < out[i].rank; ++k) {
      const Expr::Impl& e = static_cast<Expr const*>(results[i].d[k])->impl;
      out[i].dims[k] = e.value;
      out[i].dynamic[k] = !e.constant;
    }
  }
  return 0;
}

// DataTypes of the outputs. -1: refused.
int32_t host_output_types(void* p, const int32_t* types, int32_t n, int32_t* out, int32_t outputs) {
  std::vector<DataType> in;
  for (int32_t i = 0; i < n; ++i) in.push_back(static_cast<DataType>(types[i]));
  std::vector<DataType> found(static_cast<size_t>(outputs));
#ifdef HOST_V2
  for (int32_t i = 0; i < outputs; ++i) found[i] = plugin(p)->getOutputDataType(i, in.data(), n);
#else
  if (build(plugin(p))->getOutputDataTypes(found.data(), outputs, in.data(), n) != 0) return -1;
#endif
  for (int32_t i = 0; i < outputs; ++i) out[i] = static_cast<int32_t>(found[i]);
  return 0;
}

// `io`: n inputs, then the outputs.
int32_t host_supports(void* p, int32_t pos, const HostTensor* io, int32_t n, int32_t outputs) {
#ifdef HOST_V2
  return plugin(p)->supportsFormatCombination(pos, descs(io, n + outputs).data(), n, outputs);
#else
  return build(plugin(p))->supportsFormatCombination(pos, dynamic_descs(io, n + outputs).data(), n, outputs);
#endif
}

// As while building, `io` at the profile's largest shapes. Bytes of workspace, -1: configurePlugin refused.
int64_t host_configure(void* p, const HostTensor* io, int32_t n, int32_t outputs) {
  const auto dynamic = dynamic_descs(io, n + outputs);
#ifdef HOST_V2
  const auto plain = descs(io, n + outputs);
  plugin(p)->configurePlugin(dynamic.data(), n, dynamic.data() + n, outputs);
  return static_cast<int64_t>(plugin(p)->getWorkspaceSize(plain.data(), n, plain.data() + n, outputs));
#else
  if (build(plugin(p))->configurePlugin(dynamic.data(), n, dynamic.data() + n, outputs) != 0) return -1;
  return static_cast<int64_t>(build(plugin(p))->getWorkspaceSize(dynamic.data(), n, dynamic.data() + n, outputs));
#endif
}

// As at run time, for what has to be refused: the pointers lead nowhere. onShapeChange (V3), then enqueue; 0 = accepted.
void host_enqueue(void* p, const HostTensor* io, int32_t n, int32_t outputs, int32_t* shapes, int32_t* enqueue) {
  const auto plain = descs(io, n + outputs);
  void* const nowhere = reinterpret_cast<void*>(uintptr_t{256});
  const std::vector<const void*> in(static_cast<size_t>(n), nowhere);
  const std::vector<void*> out(static_cast<size_t>(outputs), nowhere);
#ifdef HOST_V2
  *shapes = 0;
  *enqueue = plugin(p)->enqueue(plain.data(), plain.data() + n, in.data(), out.data(), nullptr, nullptr);
#else
  *shapes = runtime(plugin(p))->onShapeChange(plain.data(), n, plain.data() + n, outputs);
  *enqueue = runtime(plugin(p))->enqueue(plain.data(), plain.data() + n, in.data(), out.data(), nullptr, nullptr);
#endif
}

// As TensorRT V2 does when an engine is loaded; 0 = accepted.
int32_t host_initialize(void* p) {
#ifdef HOST_V2
  return plugin(p)->initialize();
#else
  return p ? 0 : 1;
#endif
}

// On a GPU: enqueue with device pointers and a stream. 0 = enqueued.
int32_t host_run(void* p, const HostTensor* io, int32_t n, int32_t outputs, const void* const* in, void* const* out,
                 void* workspace, void* stream) {
  const auto plain = descs(io, n + outputs);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
#ifdef HOST_V2
  return plugin(p)->enqueue(plain.data(), plain.data() + n, in, out, workspace, on);
#else
  if (runtime(plugin(p))->onShapeChange(plain.data(), n, plain.data() + n, outputs) != 0) return 1;
  return runtime(plugin(p))->enqueue(plain.data(), plain.data() + n, in, out, workspace, on);
#endif
}

// V3: what keys the timing cache.
const char* host_timing_key(void* p) {
#ifdef HOST_V2
  return p ? "" : nullptr;
#else
  return build(plugin(p))->getTimingCacheID();
#endif
}

}  // extern "C"
