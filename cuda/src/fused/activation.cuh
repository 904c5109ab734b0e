// The activations of fused regions, on fp32 values.
//
// Both GELUs are written relu(x) - |x| * tail(|x|) with tail(a) = P(X > a) for the normal distribution or its tanh form. log2 of the tail is
// smooth: a polynomial in a (minimax on [0, 6] and [0, 5.5], fitted by Lawson's weights) and one exp2 give it to a relative
// 3e-6 and 9e-5, far out on the negative side too, where 1 + erf(x) has cancelled. Beyond the fitted range the polynomials fall on.
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
  constexpr float kErf[8] = {-9.99995295e-01f, -1.15125104e+00f, -4.58464397e-01f, -5.39600663e-02f,
                             8.50788970e-03f,  -9.30524569e-04f, 6.15982619e-05f,  -1.83481000e-06f};
  constexpr float kTanh[8] = {-9.99874986e-01f, -1.15472457e+00f, -4.42118212e-01f, -8.16816112e-02f,
                              3.27343814e-02f,  -1.01915913e-02f, 1.24964654e-03f,  -5.73228199e-05f};
  if constexpr (kActivation == Activation::kRelu) return relu(x);
  if constexpr (kActivation == Activation::kGeluErf || kActivation == Activation::kGeluTanh) {
    const float a = fminf(fabsf(x), 12.0f);  // infinity times a tail of zero would be NaN
    const float tail = exp2_fast(polynomial<7>(kActivation == Activation::kGeluErf ? kErf : kTanh, a));
    return fmaf(-a, tail, relu(x));
  }
  if constexpr (kActivation == Activation::kSilu) return x * reciprocal(1.0f + exp2_fast(-1.44269504088896340736f * x));
  return x;
}

}  // namespace stof::sm90
