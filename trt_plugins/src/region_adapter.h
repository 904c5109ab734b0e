// What the two adapters of StofFusedRegion share.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "adapter.h"
#include "log.h"
#include "region_core.h"

namespace stof {

constexpr char kRegionName[] = "StofFusedRegion";

// A node: its configuration, the bytes and the text it is known by, and its core. Copies share the core, which they do not change.
struct Region {
  RegionConfig config;
  std::vector<unsigned char> bytes;
  std::string text;
  std::shared_ptr<RegionCore> core;

  // Throws std::bad_alloc. nullptr, or what is wrong, in `error`.
  const char* make(const RegionConfig& from, char* error, size_t error_size) {
    core = make_region(from, error, error_size);
    if (!core) return error;
    config = from;
    bytes = serialize(from);
    text = describe(from);
    return nullptr;
  }
};

class RegionFieldList final : public FieldList {
 public:
  RegionFieldList() : FieldList(region_field_count(), region_field_name, region_field_kind) {}
};

inline nvinfer1::DataType data_type(ElementType type) {
  switch (type) {
    case ElementType::kF16: return nvinfer1::DataType::kHALF;
    case ElementType::kI32: return nvinfer1::DataType::kINT32;
#if NV_TENSORRT_MAJOR >= 10
    case ElementType::kBF16: return nvinfer1::DataType::kBF16;
#endif
    default: return nvinfer1::DataType::kFLOAT;
  }
}

class ExprDims final : public DimBuilder {
 public:
  ExprDims(const nvinfer1::DimsExprs* in, nvinfer1::IExprBuilder& builder) : in_(in), builder_(builder) {}
  int32_t rank(int32_t input) const override { return in_[input].nbDims; }
  Dim input(int32_t input, int32_t axis) override { return in_[input].d[axis]; }
  Dim constant(int64_t value) override {
    // 32 bits in TensorRT 8.
    return builder_.constant(static_cast<std::remove_const_t<decltype(nvinfer1::Dims::d[0] + 0)>>(value));
  }
  Dim operation(Op op, Dim a, Dim b) override {
    using nvinfer1::DimensionOperation;
    constexpr DimensionOperation kOps[] = {DimensionOperation::kSUM,       DimensionOperation::kSUB,      DimensionOperation::kPROD,
                                           DimensionOperation::kMAX,       DimensionOperation::kMIN,      DimensionOperation::kFLOOR_DIV,
                                           DimensionOperation::kCEIL_DIV};
    return builder_.operation(kOps[static_cast<int>(op)], expr(a), expr(b));
  }
  static const nvinfer1::IDimensionExpr& expr(Dim d) { return *static_cast<const nvinfer1::IDimensionExpr*>(d); }

 private:
  const nvinfer1::DimsExprs* in_;
  nvinfer1::IExprBuilder& builder_;
};

// Shape of an output; false where the inputs do not fit the template.
inline bool region_output_dims(const RegionCore& core, int32_t output, const nvinfer1::DimsExprs* in, int32_t n,
                               nvinfer1::IExprBuilder& builder, nvinfer1::DimsExprs& out) {
  ExprDims dims(in, builder);
  OutputDims result{};
  if (n != core.num_inputs() || !core.output_dims(output, dims, result)) return false;
  out.nbDims = result.rank;
  for (int32_t i = 0; i < result.rank; ++i) out.d[i] = &ExprDims::expr(result.dims[i]);
  return true;
}

// Runs `make`, which may throw, and logs what is wrong. Null then.
template <class Plugin, class Read>
Plugin* make_region_plugin(const char* name, Read read) noexcept {
  try {
    RegionConfig config;
    Region region;
    char error[256];
    const char* why = read(config, error, sizeof error);
    if (!why) why = region.make(config, error, sizeof error);
    if (!why) return new Plugin(region);
    log_error(kRegionName, name ? name : "create", why);
  } catch (...) {
    log_error(kRegionName, name ? name : "create", "out of memory");
  }
  return nullptr;
}

}  // namespace stof
