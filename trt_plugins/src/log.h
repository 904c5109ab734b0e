// Messages to TensorRT's logger, or to stderr before there is one.
#pragma once

namespace stof {

// `plugin`: the plugin's name; `where`: its node, or what TensorRT was asking for.
void log_error(const char* plugin, const char* where, const char* what) noexcept;

}  // namespace stof
