// Element types: conversion to and from fp32, and packing of two neighbours into one 32-bit register.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace stof {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}
template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// Stores (low, high) at p[0], p[1]; p is aligned to two elements.
template <typename T>
__device__ __forceinline__ void store_pair(T* p, float low, float high) {
  *reinterpret_cast<uint32_t*>(p) = pack2<T>(low, high);
}
template <>
__device__ __forceinline__ void store_pair<float>(float* p, float low, float high) {
  *reinterpret_cast<float2*>(p) = make_float2(low, high);
}

// The elements of a 16-byte vector as fp32: 8 of a 2-byte type, 4 of fp32.
template <typename T>
struct Vec16 {
  static constexpr int kSize = 16 / sizeof(T);
  __device__ static void load(float (&out)[kSize], const T* p) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    const T* e = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < kSize; ++i) out[i] = to_float(e[i]);
  }
  __device__ static void store(T* p, const float (&in)[kSize]) {
    uint4 raw;
    T* e = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < kSize; i += 2) store_pair(e + i, in[i], in[i + 1]);
    *reinterpret_cast<uint4*>(p) = raw;
  }
};

}  // namespace stof
