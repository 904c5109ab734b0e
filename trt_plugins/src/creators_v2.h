// The creators of the library, one a plugin.
#pragma once
#include "NvInfer.h"

namespace stof {

nvinfer1::IPluginCreator* attention_creator();
nvinfer1::IPluginCreator* region_creator();

}  // namespace stof
