// Messages to TensorRT's logger, or to stderr before there is one.
#pragma once

namespace stof {

void log_error(const char* where, const char* what) noexcept;

}  // namespace stof
