// The creators of the library, one a plugin.
#pragma once
#include "NvInfer.h"

namespace stof {

nvinfer1::IPluginCreatorInterface* attention_creator();
nvinfer1::IPluginCreatorInterface* region_creator();

}  // namespace stof
