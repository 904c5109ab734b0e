// C face of the kernels, for ctypes: tests, benchmarks and tuning. The only symbols libstof_capi.so exports.
#include "stof/attention.h"

#define STOF_API extern "C" __attribute__((visibility("default")))

// Raised with every change of stof::AttentionParams.
STOF_API int stof_abi_version() { return 1; }
STOF_API size_t stof_sizeof_attention_params() { return sizeof(stof::AttentionParams); }

STOF_API const char* stof_attention_unsupported(const stof::AttentionParams* p) { return stof::attention_unsupported(*p); }
STOF_API size_t stof_attention_workspace_bytes(const stof::AttentionParams* p) { return stof::attention_workspace_bytes(*p); }
STOF_API int stof_attention_forward(const stof::AttentionParams* p, void* stream) {
  return static_cast<int>(stof::attention_forward(*p, static_cast<cudaStream_t>(stream)));
}
STOF_API const char* stof_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
