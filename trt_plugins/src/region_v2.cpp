// StofFusedRegion as an IPluginV2DynamicExt, for TensorRT 8.6 to 9.
#include <cstring>
#include <memory>

#include "creators_v2.h"
#include "damaged_v2.h"
#include "region_adapter.h"

namespace stof {
namespace {

using namespace nvinfer1;

class RegionV2 final : public IPluginV2DynamicExt {
 public:
  explicit RegionV2(const Region& region) : region_(region) {}

  DimsExprs getOutputDimensions(int32_t output, const DimsExprs* inputs, int32_t n, IExprBuilder& builder) noexcept override {
    DimsExprs out{};
    if (!region_output_dims(core(), output, inputs, n, builder, out)) {
      log_error(kRegionName, "shapes", "number or ranks of the inputs do not fit the template");
      out.nbDims = -1;
    }
    return out;
  }
  bool supportsFormatCombination(int32_t pos, const PluginTensorDesc* io, int32_t n, int32_t outputs) noexcept override {
    return n == core().num_inputs() && outputs == core().num_outputs() && pos >= 0 && pos < n + outputs &&
           io[pos].format == TensorFormat::kLINEAR && core().supports(pos, TensorDescs(io, n + outputs).tensors);
  }
  // Can not fail; getWorkspaceSize and enqueue refuse what is wrong here.
  void configurePlugin(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*, int32_t) noexcept override {}
  size_t getWorkspaceSize(const PluginTensorDesc* in, int32_t n, const PluginTensorDesc*, int32_t) const noexcept override {
    const TensorDescs descs(in, n);
    size_t bytes = 0;
    char error[256];
    const char* why = core().refused_here(error, sizeof error);
    if (!why) why = core().check(descs.tensors, descs.count, bytes, error, sizeof error);
    if (why) log_error(kRegionName, "workspace", why);
    return why ? kNoWorkspaceIsEnough : bytes;
  }
  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* inputs, void* const* outputs,
                  void* workspace, cudaStream_t stream) noexcept override {
    const TensorDescs descs(in, core().num_inputs());
    char error[256];
    const char* const why =
        core().enqueue(descs.tensors, descs.count, inputs, outputs, workspace, stream, error, sizeof error);
    if (why) log_error(kRegionName, "enqueue", why);
    return why ? 1 : 0;
  }

  DataType getOutputDataType(int32_t output, const DataType* types, int32_t n) const noexcept override {
    ElementType in[kMaxTensors] = {};
    for (int32_t i = 0; i < n && i < kMaxTensors; ++i) in[i] = element_type(types[i]);
    return data_type(core().output_type(output, in));
  }
  const char* getPluginType() const noexcept override { return kRegionName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  int32_t getNbOutputs() const noexcept override { return core().num_outputs(); }
  // When an engine is built, and when it is loaded.
  int32_t initialize() noexcept override {
    char error[256];
    const char* why = core().refused_here(error, sizeof error);
    if (!why) why = region_.core->prepare(error, sizeof error);
    if (why) log_error(kRegionName, "initialize", why);
    return why ? 1 : 0;
  }
  void terminate() noexcept override {}
  size_t getSerializationSize() const noexcept override { return region_.bytes.size(); }
  void serialize(void* buffer) const noexcept override { std::memcpy(buffer, region_.bytes.data(), region_.bytes.size()); }
  void destroy() noexcept override { delete this; }
  IPluginV2DynamicExt* clone() const noexcept override {
    try {
      return new RegionV2(region_);
    } catch (...) {
      log_error(kRegionName, "clone", "out of memory");
      return nullptr;
    }
  }
  // The creator is registered under one namespace: an engine finds it under no other.
  void setPluginNamespace(const char*) noexcept override {}
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  const RegionCore& core() const { return *region_.core; }

  Region region_;
};

class RegionV2Creator final : public IPluginCreator {
 public:
  const char* getPluginName() const noexcept override { return kRegionName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const PluginFieldCollection* getFieldNames() noexcept override { return fields_.get(); }
  IPluginV2* createPlugin(const char* name, const PluginFieldCollection* fc) noexcept override {
    return make_region_plugin<RegionV2>(name, [fc](RegionConfig& config, char* error, size_t size) {
      const Fields fields(fc);
      return read_region_fields(fields.data(), fields.count(), config, error, size);
    });
  }
  IPluginV2* deserializePlugin(const char* name, const void* data, size_t length) noexcept override {
    IPluginV2* const plugin =
        make_region_plugin<RegionV2>(name, [data, length](RegionConfig& config, char* error, size_t size) {
          return deserialize(data, length, config, error, size);
        });
    return plugin ? plugin : new (std::nothrow) DamagedV2(kRegionName);
  }
  void setPluginNamespace(const char*) noexcept override {}
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  RegionFieldList fields_;
};

}  // namespace

nvinfer1::IPluginCreator* region_creator() {
  static RegionV2Creator creator;
  return &creator;
}

}  // namespace stof
