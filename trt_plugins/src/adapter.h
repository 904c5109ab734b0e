// What all adapters share of TensorRT's own types, which V2 and V3 have in common.
#pragma once
#include <vector>

#include "NvInfer.h"
#include "field.h"
#include "tensor_desc.h"

namespace stof {

constexpr char kPluginVersion[] = "1";
constexpr char kPluginNamespace[] = "stof";

inline ElementType element_type(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kHALF: return ElementType::kF16;
    case nvinfer1::DataType::kFLOAT: return ElementType::kF32;
    case nvinfer1::DataType::kINT32: return ElementType::kI32;
#if NV_TENSORRT_MAJOR >= 10
    case nvinfer1::DataType::kBF16: return ElementType::kBF16;
#endif
    default: return ElementType::kOther;
  }
}

inline TensorDesc tensor_desc(const nvinfer1::Dims& dims, nvinfer1::DataType type) {
  TensorDesc t{element_type(type), dims.nbDims < 0 ? 0 : dims.nbDims > 8 ? 8 : dims.nbDims, {}};
  for (int32_t i = 0; i < t.rank; ++i) t.dims[i] = dims.d[i];
  return t;
}

// Descriptions of `n` tensors.
struct TensorDescs {
  TensorDesc tensors[kMaxTensors];
  int32_t count;
  TensorDescs(const nvinfer1::PluginTensorDesc* in, int32_t n) : count(n < kMaxTensors ? n : kMaxTensors) {
    for (int32_t i = 0; i < count; ++i) tensors[i] = tensor_desc(in[i].dims, in[i].type);
  }
  // At the largest shapes of the optimization profile (`desc` has them only where they are static).
  TensorDescs(const nvinfer1::DynamicPluginTensorDesc* in, int32_t n) : count(n < kMaxTensors ? n : kMaxTensors) {
    for (int32_t i = 0; i < count; ++i) tensors[i] = tensor_desc(in[i].max, in[i].desc.type);
  }
};

// More than any GPU has: TensorRT drops what asks for it, since getWorkspaceSize has no other way to say no. A size of 0
// would let a kernel write into its neighbours' workspace.
constexpr size_t kNoWorkspaceIsEnough = size_t{1} << 46;

// The attributes a creator declares to the ONNX parser.
class FieldList {
 public:
  FieldList(int32_t count, const char* (*name)(int32_t), Field::Kind (*kind_of)(int32_t)) {
    for (int32_t i = 0; i < count; ++i) {
      const Field::Kind kind = kind_of(i);
      const auto type = kind == Field::Kind::kFloat ? nvinfer1::PluginFieldType::kFLOAT32
                        : kind == Field::Kind::kInt ? nvinfer1::PluginFieldType::kINT32
                                                    : nvinfer1::PluginFieldType::kCHAR;
      fields_.emplace_back(name(i), nullptr, type, kind == Field::Kind::kText ? 0 : 1);
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  const nvinfer1::PluginFieldCollection* get() const { return &collection_; }

 private:
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

// The attributes TensorRT hands over. Integers of 64 bits that fit 32 are narrowed.
class Fields {
 public:
  explicit Fields(const nvinfer1::PluginFieldCollection* fc) {
    const int32_t n = fc && fc->fields ? fc->nbFields : 0;
    narrowed_.reserve(static_cast<size_t>(n > 0 ? n : 0));  // pointers into it stay valid
    for (int32_t i = 0; i < n; ++i) {
      const nvinfer1::PluginField& f = fc->fields[i];
      Field field{f.name, Field::Kind::kOther, f.data, f.length};
      if (f.type == nvinfer1::PluginFieldType::kFLOAT32) field.kind = Field::Kind::kFloat;
      if (f.type == nvinfer1::PluginFieldType::kINT32) field.kind = Field::Kind::kInt;
      if (f.type == nvinfer1::PluginFieldType::kCHAR) field.kind = Field::Kind::kText;
#if NV_TENSORRT_MAJOR >= 10
      if (f.type == nvinfer1::PluginFieldType::kINT64 && f.length == 1 && f.data) {
        const int64_t wide = *static_cast<const int64_t*>(f.data);
        if (wide >= INT32_MIN && wide <= INT32_MAX) {
          narrowed_.push_back(static_cast<int32_t>(wide));
          field.kind = Field::Kind::kInt;
          field.data = &narrowed_.back();
        }
      }
#endif
      fields_.push_back(field);
    }
  }
  const Field* data() const { return fields_.data(); }
  int32_t count() const { return static_cast<int32_t>(fields_.size()); }

 private:
  std::vector<Field> fields_;
  std::vector<int32_t> narrowed_;
};

}  // namespace stof
