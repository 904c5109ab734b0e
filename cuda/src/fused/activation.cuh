// The activations of fused regions, on fp32 values.
//
// GELU is written relu(x) - |x| * tail(|x|) with tail(a) = P(X > a) for the normal distribution. log2 of the tail is smooth: a polynomial in a
// (minimax on [0, 6], fitted with Lawson's weights) and one exp2 give it to a relative 4.5e-5, far out on the negative side too, where
// 1 + erf(x) has cancelled. Its tanh form is x * sigmoid(2 u), as SiLU is x * sigmoid(x).
#pragma once
#include "sm90/fragments.cuh"
#include "stof/fused.h"

namespace stof::sm90 {

// max(x, 0) that keeps NaN.
__device__ __forceinline__ float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int kDegree>
__device__ __forceinline__ float polynomial(const float (&c)[kDegree + 1], float x) {
  float y = c[kDegree];
#pragma unroll
  for (int i = kDegree - 1; i >= 0; --i) y = fmaf(y, x, c[i]);
  return y;
}

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  constexpr float kTail[7] = {-1.00006479e+00f, -1.15017427e+00f, -4.61271915e-01f, -5.11853413e-02f,
                              7.19556645e-03f,  -6.11100095e-04f, 2.29900612e-05f};
  constexpr float kLog2E = 1.44269504088896340736f, kSqrt2OverPi = 0.79788456080286535588f;
  if constexpr (kActivation == Activation::kRelu) return relu(x);
  if constexpr (kActivation == Activation::kGeluErf) {
    const float a = fminf(fabsf(x), 12.0f);  // beyond, the tail is 0, and infinity times 0 would be NaN
    return fmaf(-a, exp2_fast(polynomial<6>(kTail, a)), relu(x));
  }
  if constexpr (kActivation == Activation::kGeluTanh) {
    const float u = x * fmaf(x * x, -2.0f * kLog2E * kSqrt2OverPi * 0.044715f, -2.0f * kLog2E * kSqrt2OverPi);
    return x * reciprocal(1.0f + exp2_fast(u));
  }
  if constexpr (kActivation == Activation::kSilu) return x * reciprocal(1.0f + exp2_fast(-kLog2E * x));
  return x;
}

}  // namespace stof::sm90
