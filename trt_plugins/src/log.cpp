#include "log.h"

#include <atomic>
#include <cstdio>

#include "NvInferRuntime.h"

namespace {
std::atomic<nvinfer1::ILoggerFinder*> g_finder{nullptr};
}

// TensorRT calls this once after loading the library.
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { g_finder = finder; }

namespace stof {

void log_error(const char* plugin, const char* where, const char* what) noexcept {
  char text[512];
  std::snprintf(text, sizeof text, "%s (%s): %s", plugin, where, what);
  nvinfer1::ILoggerFinder* const finder = g_finder;
  nvinfer1::ILogger* const logger = finder ? finder->findLogger() : nullptr;
  if (logger)
    logger->log(nvinfer1::ILogger::Severity::kERROR, text);
  else
    std::fprintf(stderr, "%s\n", text);
}

}  // namespace stof
