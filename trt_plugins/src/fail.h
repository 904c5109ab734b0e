// Sentences about what is wrong, written to the caller's buffer.
#pragma once
#include <cstdarg>
#include <cstddef>
#include <cstdio>

namespace stof {

// Formats into `error` and returns it.
__attribute__((format(printf, 3, 4))) inline const char* fail(char* error, size_t size, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(error, size, format, args);
  va_end(args);
  return error;
}

}  // namespace stof
