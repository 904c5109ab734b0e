// What an engine gets in place of a plugin whose bytes are damaged.
#pragma once
#include <new>

#include "adapter.h"
#include "log.h"

namespace stof {

// TensorRT 8.6 does not survive a deserializePlugin that returns nothing (seen: a segmentation fault), while it is to
// refuse an engine whose plugin reports an error from initialize(). That it does so here was not yet seen on a GPU.
class DamagedV2 final : public nvinfer1::IPluginV2DynamicExt {
 public:
  explicit DamagedV2(const char* name) : name_(name) {}

  int32_t initialize() noexcept override {
    log_error(name_, "initialize", "its bytes in the engine are damaged, or of another version");
    return 1;
  }
  int32_t enqueue(const nvinfer1::PluginTensorDesc*, const nvinfer1::PluginTensorDesc*, const void* const*, void* const*,
                  void*, cudaStream_t) noexcept override {
    return 1;
  }
  nvinfer1::DimsExprs getOutputDimensions(int32_t, const nvinfer1::DimsExprs*, int32_t,
                                          nvinfer1::IExprBuilder&) noexcept override {
    nvinfer1::DimsExprs none{};
    none.nbDims = -1;
    return none;
  }
  bool supportsFormatCombination(int32_t, const nvinfer1::PluginTensorDesc*, int32_t, int32_t) noexcept override {
    return false;
  }
  void configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                       int32_t) noexcept override {}
  size_t getWorkspaceSize(const nvinfer1::PluginTensorDesc*, int32_t, const nvinfer1::PluginTensorDesc*,
                          int32_t) const noexcept override {
    return kNoWorkspaceIsEnough;
  }
  nvinfer1::DataType getOutputDataType(int32_t, const nvinfer1::DataType*, int32_t) const noexcept override {
    return nvinfer1::DataType::kFLOAT;
  }
  const char* getPluginType() const noexcept override { return name_; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  int32_t getNbOutputs() const noexcept override { return 1; }
  void terminate() noexcept override {}
  size_t getSerializationSize() const noexcept override { return 0; }
  void serialize(void*) const noexcept override {}
  void destroy() noexcept override { delete this; }
  IPluginV2DynamicExt* clone() const noexcept override { return new (std::nothrow) DamagedV2(name_); }
  void setPluginNamespace(const char*) noexcept override {}
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  const char* name_;
};

}  // namespace stof
