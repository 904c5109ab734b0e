// Runs an engine that stof-onnx wrote, with TensorRT and nothing else:
//
//   g++ -std=c++17 run_engine.cpp -I$TENSORRT/include -I$CUDA/include -L$TENSORRT/lib -lnvinfer -L$CUDA/lib64 -lcudart -o run_engine
//   ./run_engine model.stof.engine x:4x256x768=x.bin        # raw values in C order; writes each output to NAME.bin
//   ./run_engine model.stof.engine --plugins libstof_plugins.so x:...      # an engine built with --no-embed
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "NvInfer.h"

namespace {

struct Logger final : nvinfer1::ILogger {
  void log(Severity severity, char const* message) noexcept override {
    if (severity <= Severity::kWARNING) std::fprintf(stderr, "%s\n", message);
  }
} logger;

[[noreturn]] void stop(const std::string& what) {
  std::fprintf(stderr, "run_engine: %s\n", what.c_str());
  std::exit(1);
}

void check(cudaError_t status) {
  if (status != cudaSuccess) stop(cudaGetErrorString(status));
}

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) stop("can not read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

size_t bytes_of(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kFLOAT:
    case nvinfer1::DataType::kINT32: return 4;
    case nvinfer1::DataType::kHALF: return 2;
    case nvinfer1::DataType::kINT8:
    case nvinfer1::DataType::kBOOL: return 1;
#if NV_TENSORRT_MAJOR >= 10  // before, int64 inputs of a model are int32 ones of its engine
    case nvinfer1::DataType::kINT64: return 8;
    case nvinfer1::DataType::kBF16: return 2;
#endif
    default: stop("a type that this example does not know");
  }
}

size_t volume(const nvinfer1::Dims& dims) {
  size_t n = 1;
  for (int i = 0; i < dims.nbDims; ++i) n *= static_cast<size_t>(dims.d[i]);
  return n;
}

struct Input {
  nvinfer1::Dims dims{};
  std::string file;
};

// "name:4x256=file".
std::pair<std::string, Input> parse(const std::string& text) {
  const size_t equals = text.rfind('='), colon = text.rfind(':', equals);
  if (equals == std::string::npos || colon == std::string::npos) stop("not NAME:DIMS=FILE: " + text);
  Input input;
  input.file = text.substr(equals + 1);
  for (const char* at = text.c_str() + colon; *at != '=' && input.dims.nbDims < nvinfer1::Dims::MAX_DIMS;) {
    char* end = nullptr;
    input.dims.d[input.dims.nbDims++] = std::strtol(at + 1, &end, 10);
    at = end;
    if (*at != 'x' && *at != '=') stop("not NAME:DIMS=FILE: " + text);
  }
  return {text.substr(0, colon), input};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) stop("usage: run_engine ENGINE [--plugins LIBRARY] NAME:DIMS=FILE ...");
  std::map<std::string, Input> inputs;
  std::string plugins;
  for (int i = 2; i < argc; ++i) {
    if (std::strcmp(argv[i], "--plugins") == 0 && i + 1 < argc)
      plugins = argv[++i];
    else
      inputs.insert(parse(argv[i]));
  }

  const std::unique_ptr<nvinfer1::IRuntime> runtime{nvinfer1::createInferRuntime(logger)};
  if (!runtime) stop("no TensorRT runtime");
  runtime->setEngineHostCodeAllowed(true);  // the engine carries the plugins' code
  if (!plugins.empty() && !runtime->getPluginRegistry().loadLibrary(plugins.c_str())) stop("can not load " + plugins);
  const std::vector<char> bytes = read(argv[1]);
  const std::unique_ptr<nvinfer1::ICudaEngine> engine{runtime->deserializeCudaEngine(bytes.data(), bytes.size())};
  if (!engine) stop("the engine does not load");
  const std::unique_ptr<nvinfer1::IExecutionContext> context{engine->createExecutionContext()};
  if (!context) stop("no execution context");

  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  std::vector<std::pair<std::string, void*>> outputs;
  for (const bool input : {true, false}) {  // the shapes of the outputs follow from those of the inputs
    for (int i = 0; i < engine->getNbIOTensors(); ++i) {
      const char* const name = engine->getIOTensorName(i);
      if ((engine->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT) != input) continue;
      if (input && !inputs.count(name)) stop(std::string("no values for the input ") + name);
      if (input && !context->setInputShape(name, inputs[name].dims)) stop(std::string("wrong shape of ") + name);
      const size_t size = volume(context->getTensorShape(name)) * bytes_of(engine->getTensorDataType(name));
      void* device = nullptr;
      check(cudaMalloc(&device, size));
      if (input) {
        const std::vector<char> values = read(inputs[name].file);
        if (values.size() != size) stop(inputs[name].file + " has " + std::to_string(values.size()) + " bytes, not " + std::to_string(size));
        check(cudaMemcpy(device, values.data(), size, cudaMemcpyHostToDevice));
      } else {
        outputs.emplace_back(name, device);
      }
      if (!context->setTensorAddress(name, device)) stop(std::string("can not bind ") + name);
    }
  }
  if (!context->enqueueV3(stream)) stop("the inference failed");
  check(cudaStreamSynchronize(stream));
  for (const auto& [name, device] : outputs) {
    const nvinfer1::Dims dims = context->getTensorShape(name.c_str());
    std::vector<char> values(volume(dims) * bytes_of(engine->getTensorDataType(name.c_str())));
    check(cudaMemcpy(values.data(), device, values.size(), cudaMemcpyDeviceToHost));
    std::ofstream(name + ".bin", std::ios::binary).write(values.data(), static_cast<std::streamsize>(values.size()));
    std::printf("%s:", name.c_str());
    for (int i = 0; i < dims.nbDims; ++i) std::printf("%s%lld", i ? "x" : " ", static_cast<long long>(dims.d[i]));
    std::printf(" written to %s.bin\n", name.c_str());
  }
}
