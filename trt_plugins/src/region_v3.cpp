// StofFusedRegion as an IPluginV3, for TensorRT 10 and newer.
#include <cstring>
#include <memory>

#include "creators_v3.h"
#include "region_adapter.h"

namespace stof {
namespace {

using namespace nvinfer1;

constexpr char kConfigField[] = "stof_config";  // the one field of a serialised plugin: region_config's bytes

class RegionV3 final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  explicit RegionV3(const Region& region) : region_(region) {
    field_ = PluginField(kConfigField, region_.bytes.data(), PluginFieldType::kUNKNOWN, static_cast<int32_t>(region_.bytes.size()));
    fields_ = {1, &field_};
  }

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
      case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
      case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
      case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  IPluginV3* clone() noexcept override {
    try {
      return new RegionV3(region_);
    } catch (...) {
      report("clone", "out of memory");
      return nullptr;
    }
  }

  AsciiChar const* getPluginName() const noexcept override { return kRegionName; }
  AsciiChar const* getPluginVersion() const noexcept override { return kPluginVersion; }
  AsciiChar const* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  int32_t getNbOutputs() const noexcept override { return core().num_outputs(); }
  int32_t getOutputDataTypes(DataType* out, int32_t outputs, const DataType* in, int32_t n) const noexcept override {
    if (outputs != core().num_outputs() || n != core().num_inputs())
      return report("types", "another number of inputs or outputs than the attributes ask for");
    ElementType types[kMaxTensors] = {};
    for (int32_t i = 0; i < n; ++i) types[i] = element_type(in[i]);
    for (int32_t i = 0; i < outputs; ++i) out[i] = data_type(core().output_type(i, types));
    return 0;
  }
  int32_t getOutputShapes(const DimsExprs* in, int32_t n, const DimsExprs*, int32_t, DimsExprs* out, int32_t outputs,
                          IExprBuilder& builder) noexcept override {
    bool fits = outputs == core().num_outputs();
    for (int32_t i = 0; fits && i < outputs; ++i) fits = region_output_dims(core(), i, in, n, builder, out[i]);
    return fits ? 0 : report("shapes", "number or ranks of the inputs do not fit the template");
  }
  bool supportsFormatCombination(int32_t pos, const DynamicPluginTensorDesc* io, int32_t n, int32_t outputs) noexcept override {
    return n == core().num_inputs() && outputs == core().num_outputs() && pos >= 0 && pos < n + outputs &&
           io[pos].desc.format == TensorFormat::kLINEAR && core().supports(pos, TensorDescs(io, n + outputs).tensors);
  }
  // At the largest shapes, so that what no kernel runs is refused while the engine is built.
  int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t n, const DynamicPluginTensorDesc*,
                          int32_t) noexcept override {
    size_t bytes = 0;
    return check("configure", TensorDescs(in, n), bytes);
  }
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t n, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    size_t bytes = 0;
    return check("workspace", TensorDescs(in, n), bytes) ? kNoWorkspaceIsEnough : bytes;
  }
  // Timings of nodes with equal attributes and shapes may be shared.
  const char* getTimingCacheID() noexcept override { return region_.text.c_str(); }
  const char* getMetadataString() noexcept override { return region_.text.c_str(); }

  int32_t onShapeChange(const PluginTensorDesc* in, int32_t n, const PluginTensorDesc*, int32_t) noexcept override {
    size_t bytes = 0;
    return check("shapes", TensorDescs(in, n), bytes);
  }
  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* inputs, void* const* outputs,
                  void* workspace, cudaStream_t stream) noexcept override {
    const TensorDescs descs(in, core().num_inputs());
    char error[256];
    const char* const why =
        core().enqueue(descs.tensors, descs.count, inputs, outputs, workspace, stream, error, sizeof error);
    return why ? report("enqueue", why) : 0;
  }
  // An engine that was built elsewhere is refused when its context is made, not at its first inference.
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override {
    char error[256];
    const char* why = core().refused_here(error, sizeof error);
    if (!why) why = region_.core->prepare(error, sizeof error);
    if (!why) return clone();
    report("context", why);
    return nullptr;
  }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &fields_; }

 private:
  const RegionCore& core() const { return *region_.core; }
  int32_t check(const char* where, const TensorDescs& in, size_t& bytes) const noexcept {
    char error[256];
    const char* why = core().refused_here(error, sizeof error);
    if (!why) why = core().check(in.tensors, in.count, bytes, error, sizeof error);
    return why ? report(where, why) : 0;
  }
  static int32_t report(const char* where, const char* what) noexcept {
    log_error(kRegionName, where, what);
    return 1;
  }

  Region region_;
  PluginField field_;
  PluginFieldCollection fields_{};
};

class RegionV3Creator final : public IPluginCreatorV3One {
 public:
  AsciiChar const* getPluginName() const noexcept override { return kRegionName; }
  AsciiChar const* getPluginVersion() const noexcept override { return kPluginVersion; }
  AsciiChar const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
  const PluginFieldCollection* getFieldNames() noexcept override { return fields_.get(); }

  IPluginV3* createPlugin(AsciiChar const* name, const PluginFieldCollection* fc, TensorRTPhase) noexcept override {
    return make_region_plugin<RegionV3>(name, [fc](RegionConfig& config, char* error, size_t size) {
      for (int32_t i = 0; fc && fc->fields && i < fc->nbFields; ++i) {
        const PluginField& f = fc->fields[i];
        if (f.name && std::strcmp(f.name, kConfigField) == 0)
          return deserialize(f.data, f.length < 0 ? 0 : static_cast<size_t>(f.length), config, error, size);
      }
      const Fields fields(fc);
      return read_region_fields(fields.data(), fields.count(), config, error, size);
    });
  }

 private:
  RegionFieldList fields_;
};

}  // namespace

nvinfer1::IPluginCreatorInterface* region_creator() {
  static RegionV3Creator creator;
  return &creator;
}

}  // namespace stof
