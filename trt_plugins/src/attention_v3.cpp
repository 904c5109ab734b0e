// StofAttention as an IPluginV3, for TensorRT 10 and newer.
#include <cstring>
#include <memory>

#include "attention_adapter.h"
#include "creators_v3.h"

namespace stof {
namespace {

using namespace nvinfer1;

constexpr char kConfigField[] = "stof_config";  // the one field of a serialised plugin: attention_config's bytes

class AttentionV3 final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  explicit AttentionV3(const AttentionConfig& config) : core_(config) {
    stof::serialize(config, bytes_);
    describe(config, metadata_, sizeof metadata_);
    field_ = PluginField(kConfigField, bytes_, PluginFieldType::kUNKNOWN, static_cast<int32_t>(sizeof bytes_));
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
  IPluginV3* clone() noexcept override { return new (std::nothrow) AttentionV3(core_.config()); }

  AsciiChar const* getPluginName() const noexcept override { return kAttentionName; }
  AsciiChar const* getPluginVersion() const noexcept override { return kPluginVersion; }
  AsciiChar const* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t getOutputDataTypes(DataType* out, int32_t outputs, const DataType* in, int32_t n) const noexcept override {
    if (outputs != 1 || n != core_.num_inputs()) return report("types", "another number of inputs than the attributes ask for");
    out[0] = in[0];
    return 0;
  }
  int32_t getOutputShapes(const DimsExprs* in, int32_t n, const DimsExprs*, int32_t, DimsExprs* out, int32_t outputs,
                          IExprBuilder& builder) noexcept override {
    if (outputs == 1 && output_shape(core_.config(), in, n, builder, out[0])) return 0;
    return report("shapes", "the ranks of the inputs do not fit the layout attribute");
  }
  bool supportsFormatCombination(int32_t pos, const DynamicPluginTensorDesc* io, int32_t n, int32_t outputs) noexcept override {
    return n == core_.num_inputs() && outputs == 1 && pos >= 0 && pos < n + outputs && io[pos].desc.format == TensorFormat::kLINEAR &&
           core_.supports(pos, TensorDescs(io, n + outputs).tensors);
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
  const char* getTimingCacheID() noexcept override { return metadata_; }
  const char* getMetadataString() noexcept override { return metadata_; }

  int32_t onShapeChange(const PluginTensorDesc* in, int32_t n, const PluginTensorDesc*, int32_t) noexcept override {
    size_t bytes = 0;
    return check("shapes", TensorDescs(in, n), bytes);
  }
  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* inputs, void* const* outputs,
                  void* workspace, cudaStream_t stream) noexcept override {
    const TensorDescs descs(in, core_.num_inputs());
    char error[256];
    const char* const why =
        core_.enqueue(descs.tensors, descs.count, inputs, outputs[0], workspace, stream, error, sizeof error);
    return why ? report("enqueue", why) : 0;
  }
  // An engine that was built elsewhere is refused when its context is made, not at its first inference.
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override {
    char error[256];
    if (const char* const why = core_.refused_here(error, sizeof error)) {
      report("context", why);
      return nullptr;
    }
    return clone();
  }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &fields_; }

 private:
  int32_t check(const char* where, const TensorDescs& in, size_t& bytes) const noexcept {
    char error[256];
    const char* why = core_.refused_here(error, sizeof error);
    if (!why) why = core_.check(in.tensors, in.count, bytes, error, sizeof error);
    return why ? report(where, why) : 0;
  }
  static int32_t report(const char* where, const char* what) noexcept {
    log_error(kAttentionName, where, what);
    return 1;
  }

  AttentionCore core_;
  unsigned char bytes_[kSerializedBytes];
  char metadata_[1024];
  PluginField field_;
  PluginFieldCollection fields_{};
};

class AttentionV3Creator final : public IPluginCreatorV3One {
 public:
  AsciiChar const* getPluginName() const noexcept override { return kAttentionName; }
  AsciiChar const* getPluginVersion() const noexcept override { return kPluginVersion; }
  AsciiChar const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
  const PluginFieldCollection* getFieldNames() noexcept override { return fields_.get(); }

  IPluginV3* createPlugin(AsciiChar const* name, const PluginFieldCollection* fc, TensorRTPhase) noexcept override {
    AttentionConfig config;
    char error[256];
    try {
      const PluginField* const stored = find_config(fc);
      const char* const why = stored ? deserialize(stored->data, stored->length < 0 ? 0 : static_cast<size_t>(stored->length),
                                                   config, error, sizeof error)
                                     : read_collection(fc, config, error, sizeof error);
      if (!why) return new AttentionV3(config);
      log_error(kAttentionName, name ? name : "create", why);
    } catch (...) {
      log_error(kAttentionName, "create", "out of memory");
    }
    return nullptr;
  }

 private:
  static const PluginField* find_config(const PluginFieldCollection* fc) noexcept {
    for (int32_t i = 0; fc && fc->fields && i < fc->nbFields; ++i)
      if (fc->fields[i].name && std::strcmp(fc->fields[i].name, kConfigField) == 0) return &fc->fields[i];
    return nullptr;
  }
  AttentionFieldList fields_;
};

}  // namespace

nvinfer1::IPluginCreatorInterface* attention_creator() {
  static AttentionV3Creator creator;
  return &creator;
}

}  // namespace stof
