#include "creators_v2.h"

// TensorRT finds the creators of a library it loads through this.
extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count) {
  static nvinfer1::IPluginCreator* const list[] = {stof::attention_creator(), stof::region_creator()};
  count = 2;
  return list;
}
