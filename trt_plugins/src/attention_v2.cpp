// StofAttention as an IPluginV2DynamicExt, for TensorRT 8.6 to 9.
#include <memory>

#include "attention_adapter.h"
#include "creators_v2.h"
#include "damaged_v2.h"

namespace stof {
namespace {

using namespace nvinfer1;

class AttentionV2 final : public IPluginV2DynamicExt {
 public:
  explicit AttentionV2(const AttentionConfig& config) : core_(config) {}

  DimsExprs getOutputDimensions(int32_t, const DimsExprs* inputs, int32_t n, IExprBuilder& builder) noexcept override {
    DimsExprs out{};
    if (!output_shape(core_.config(), inputs, n, builder, out)) {
      log_error(kAttentionName, "shapes", "the ranks of the inputs do not fit the layout attribute");
      out.nbDims = -1;
    }
    return out;
  }
  bool supportsFormatCombination(int32_t pos, const PluginTensorDesc* io, int32_t n, int32_t outputs) noexcept override {
    return n == core_.num_inputs() && outputs == 1 && pos >= 0 && pos < n + outputs && io[pos].format == TensorFormat::kLINEAR &&
           core_.supports(pos, TensorDescs(io, n + outputs).tensors);
  }
  // Can not fail; getWorkspaceSize and enqueue refuse what is wrong here.
  void configurePlugin(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*, int32_t) noexcept override {}
  size_t getWorkspaceSize(const PluginTensorDesc* in, int32_t n, const PluginTensorDesc*, int32_t) const noexcept override {
    const TensorDescs descs(in, n);
    size_t bytes = 0;
    char error[256];
    const char* why = core_.refused_here(error, sizeof error);
    if (!why) why = core_.check(descs.tensors, descs.count, bytes, error, sizeof error);
    if (why) log_error(kAttentionName, "workspace", why);
    return why ? kNoWorkspaceIsEnough : bytes;
  }
  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* inputs, void* const* outputs,
                  void* workspace, cudaStream_t stream) noexcept override {
    const TensorDescs descs(in, core_.num_inputs());
    char error[256];
    const char* const why =
        core_.enqueue(descs.tensors, descs.count, inputs, outputs[0], workspace, stream, error, sizeof error);
    if (why) log_error(kAttentionName, "enqueue", why);
    return why ? 1 : 0;
  }

  DataType getOutputDataType(int32_t, const DataType* types, int32_t) const noexcept override { return types[0]; }
  const char* getPluginType() const noexcept override { return kAttentionName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  int32_t getNbOutputs() const noexcept override { return 1; }
  // When an engine is built, and when it is loaded.
  int32_t initialize() noexcept override {
    char error[256];
    const char* const why = core_.refused_here(error, sizeof error);
    if (why) log_error(kAttentionName, "initialize", why);
    return why ? 1 : 0;
  }
  void terminate() noexcept override {}
  size_t getSerializationSize() const noexcept override { return kSerializedBytes; }
  void serialize(void* buffer) const noexcept override { stof::serialize(core_.config(), buffer); }
  void destroy() noexcept override { delete this; }
  IPluginV2DynamicExt* clone() const noexcept override { return new (std::nothrow) AttentionV2(core_.config()); }
  // The creator is registered under one namespace: an engine finds it under no other.
  void setPluginNamespace(const char*) noexcept override {}
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  AttentionCore core_;
};

class AttentionV2Creator final : public IPluginCreator {
 public:
  const char* getPluginName() const noexcept override { return kAttentionName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const PluginFieldCollection* getFieldNames() noexcept override { return fields_.get(); }
  IPluginV2* createPlugin(const char* name, const PluginFieldCollection* fc) noexcept override {
    AttentionConfig config;
    char error[256];
    try {
      return make(read_collection(fc, config, error, sizeof error), name, config);
    } catch (...) {
      log_error(kAttentionName, "create", "out of memory");
      return nullptr;
    }
  }
  IPluginV2* deserializePlugin(const char* name, const void* data, size_t length) noexcept override {
    AttentionConfig config;
    char error[256];
    IPluginV2* const plugin = make(deserialize(data, length, config, error, sizeof error), name, config);
    return plugin ? plugin : new (std::nothrow) DamagedV2(kAttentionName);
  }
  void setPluginNamespace(const char*) noexcept override {}
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  static IPluginV2* make(const char* why, const char* name, const AttentionConfig& config) noexcept {
    if (!why) return new (std::nothrow) AttentionV2(config);
    log_error(kAttentionName, name ? name : "create", why);
    return nullptr;
  }
  AttentionFieldList fields_;
};

}  // namespace

nvinfer1::IPluginCreator* attention_creator() {
  static AttentionV2Creator creator;
  return &creator;
}

}  // namespace stof
