// GPUs for tests on machines without one. TensorFlow loads this library by TF_PLUGGABLE_DEVICE_LIBRARY_PATH.
//
//   FAKE_GPUS      how many GPUs the machine has; CUDA_VISIBLE_DEVICES with numbers chooses among them, as with CUDA
//   FAKE_GPU_LOG   a folder, in which each process PID appends to PID.log a line
//                  "device NAME NUMBER FRACTION GROWTH" for each device that it makes, and
//                  "kernel NAME OPERATION" for each kernel that it makes on one
//
// The memory of these GPUs is memory of the host, and their kernels are those of the CPU. TensorFlow's Linux build has
// its CUDA kernels registered, and each of them gets a substitute with the same constraints on types and the same
// arguments in the memory of the host. So an operation is placed on such a GPU, and its tensors are copied to and from
// it, exactly where that would happen with a real one. There is no NCCL, no XLA, no cuDNN and no limit of memory.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "tensorflow/core/common_runtime/copy_tensor.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/gpu/gpu_util.h"
#include "tensorflow/core/common_runtime/local_device.h"
#include "tensorflow/core/common_runtime/scoped_allocator_mgr.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/memory_types.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/public/session_options.h"

namespace fake_gpu {

using namespace tensorflow;  // NOLINT

constexpr int kPriority = 300;  // above that of TensorFlow's own factory for GPUs, which finds none
constexpr int64_t kBytes = int64_t{16} << 30;

void Log(const std::string& line) {
  if (const char* folder = std::getenv("FAKE_GPU_LOG")) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    std::ofstream(std::string(folder) + "/" + std::to_string(getpid()) + ".log", std::ios::app) << line << std::endl;
  }
}

std::vector<int> Numbers(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream stream(text);
  for (std::string each; std::getline(stream, each, ',');) numbers.push_back(std::atoi(each.c_str()));
  return numbers;
}

// The numbers of the GPUs that this process sees. CUDA ignores what follows an invalid number.
std::vector<int> Visible() {
  const char* set = std::getenv("FAKE_GPUS");
  const int count = set ? std::atoi(set) : 0;
  std::vector<int> visible;
  if (const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES")) {
    for (int number : Numbers(chosen)) {
      if (number < 0 || number >= count) break;
      visible.push_back(number);
    }
  } else {
    for (int number = 0; number < count; ++number) visible.push_back(number);
  }
  return visible;
}

void DeepCopy(const Tensor* from, Tensor* to, const StatusCallback& done) {
  tensor::DeepCopy(*from, to);
  done(absl::OkStatus());
}

// Tensors are copied between "host" and "device" although both are memory of the host.
class HostMemoryContext : public DeviceContext {
  void CopyCPUTensorToDevice(const Tensor* from, Device*, Tensor* to, StatusCallback done, bool) const override {
    DeepCopy(from, to, done);
  }
  void CopyDeviceTensorToCPU(const Tensor* from, absl::string_view, Device*, Tensor* to, StatusCallback done) override {
    DeepCopy(from, to, done);
  }
  void CopyTensorInSameDevice(const Tensor* from, Device*, Tensor* to, StatusCallback done) const override {
    DeepCopy(from, to, done);
  }
  absl::Status ThenExecute(Device*, stream_executor::Stream*, std::function<void()> then) override {
    then();
    return absl::OkStatus();
  }
};

class FakeGpu : public LocalDevice {
 public:
  FakeGpu(const SessionOptions& options, const DeviceAttributes& attributes, int number)
      : LocalDevice(options, attributes), context_(new HostMemoryContext), scopes_(attributes.name()) {
    accelerator_.default_context = context_;
    accelerator_.gpu_id = number;
    set_tensorflow_accelerator_device_info(&accelerator_);
  }
  ~FakeGpu() override { context_->Unref(); }

  absl::Status TryGetDeviceContext(DeviceContext** context) override {
    context_->Ref();
    *context = context_;
    return absl::OkStatus();
  }
  Allocator* GetAllocator(AllocatorAttributes) override { return cpu_allocator(); }
  Allocator* GetScopedAllocator(AllocatorAttributes attributes, int64_t step) override {
    if (attributes.scope_id <= 0) return cpu_allocator();
    return scopes_.GetContainer(step)->GetInstance(attributes.scope_id);
  }
  ScopedAllocatorMgr* GetScopedAllocatorMgr() const override { return const_cast<ScopedAllocatorMgr*>(&scopes_); }
  absl::Status MakeTensorFromProto(const TensorProto& proto, const AllocatorAttributes, Tensor* tensor) override {
    return tensor->FromProto(cpu_allocator(), proto) ? absl::OkStatus() : absl::InvalidArgumentError("not a tensor");
  }
  void CopyTensorInSameDevice(const Tensor* from, Tensor* to, const DeviceContext*, StatusCallback done) override {
    DeepCopy(from, to, done);
  }
  absl::Status Sync() override { return absl::OkStatus(); }

 private:
  DeviceContext* context_;
  AcceleratorDeviceInfo accelerator_;
  ScopedAllocatorMgr scopes_;
};

class FakeGpuFactory : public DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    const size_t count = Visible().size();
    for (size_t i = 0; i < count; ++i) devices->push_back("/physical_device:GPU:" + std::to_string(i));
    return absl::OkStatus();
  }

  absl::Status GetDeviceDetails(int, std::unordered_map<std::string, std::string>* details) override {
    *details = {{"device_name", "fake"}, {"compute_capability", "8.0"}};
    return absl::OkStatus();
  }

  absl::Status CreateDevices(const SessionOptions& options, const std::string& prefix,
                             std::vector<std::unique_ptr<Device>>* devices) override {
    const std::vector<int> visible = Visible();
    const GPUOptions& gpu_options = options.config.gpu_options();
    std::vector<int> order = Numbers(gpu_options.visible_device_list());
    if (gpu_options.visible_device_list().empty()) {
      for (size_t i = 0; i < visible.size(); ++i) order.push_back(i);
    }
    const auto& counts = options.config.device_count();
    if (counts.count("GPU")) order.resize(std::min<size_t>(order.size(), std::max(0, counts.at("GPU"))));
    for (size_t i = 0; i < order.size(); ++i) {
      if (order[i] < 0 || order[i] >= static_cast<int>(visible.size())) {
        return absl::InvalidArgumentError("visible_device_list has a GPU that there is not");
      }
      // TensorFlow's devices of the same number are the same GPU in all sessions and servers of a process.
      static auto* gpus = new std::map<int, int>;
      if (gpus->emplace(i, order[i]).first->second != order[i]) {
        return absl::AlreadyExistsError("GPU:" + std::to_string(i) + " is another device already");
      }
      const std::string name = prefix + "/device:GPU:" + std::to_string(i);
      const auto attributes = Device::BuildDeviceAttributes(name, "GPU", Bytes(kBytes), DeviceLocality());
      devices->push_back(std::make_unique<FakeGpu>(options, attributes, order[i]));
      std::ostringstream line;
      line << "device " << name << " " << visible[order[i]] << " " << gpu_options.per_process_gpu_memory_fraction()
           << " " << gpu_options.allow_growth();
      Log(line.str());
    }
    return absl::OkStatus();
  }
};

// Makes the kernel of the CPU for an operation on a fake GPU.
class SubstituteFactory : public kernel_factory::OpKernelFactory {
  OpKernel* Create(OpKernelConstruction* its) override {
    OpKernel* kernel = nullptr;
    its->SetStatus(CreateOpKernel(DeviceType("CPU"), its->device_, its->allocator_, its->flib_, its->resource_mgr_,
                                  its->props_, its->graph_def_version_, &kernel));
    if (kernel == nullptr) return nullptr;
    // The executor asks the kernel where its arguments lie.
    its->SetStatus(MemoryTypesForNode(OpRegistry::Global(), DeviceType("GPU"), its->def(),
                                      const_cast<MemoryTypeVector*>(&kernel->input_memory_types_),
                                      const_cast<MemoryTypeVector*>(&kernel->output_memory_types_)));
    Log("kernel " + its->device_->attributes().name() + " " + its->def().op());
    return kernel;
  }
};

void CopyBetweenGpus(DeviceContext*, DeviceContext*, Device*, Device*, const AllocatorAttributes,
                     const AllocatorAttributes, const Tensor* from, Tensor* to, int, StatusCallback done) {
  DeepCopy(from, to, done);
}

// TensorFlow has its copy from GPU to GPU registered, which needs CUDA's streams, and takes no second one. So its first
// instructions are overwritten by "mov rax, &CopyBetweenGpus; jmp rax".
void RedirectCopiesBetweenGpus() {
  auto* code = reinterpret_cast<uint8_t*>(&GPUUtil::DeviceToDeviceCopy);
  const auto target = reinterpret_cast<uintptr_t>(&CopyBetweenGpus);
  const uintptr_t page_size = sysconf(_SC_PAGESIZE), page = reinterpret_cast<uintptr_t>(code) & ~(page_size - 1);
  // Two pages, since the instructions may cross the end of the first.
  if (mprotect(reinterpret_cast<void*>(page), 2 * page_size, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) std::abort();
  code[0] = 0x48, code[1] = 0xb8, code[10] = 0xff, code[11] = 0xe0;
  std::memcpy(code + 2, &target, sizeof target);
}

struct OnLoad {
  OnLoad() {
    RedirectCopiesBetweenGpus();
    DeviceFactory::Register("GPU", std::make_unique<FakeGpuFactory>(), kPriority, /*is_pluggable_device=*/false);
    const auto is_cuda = [](const KernelDef& kernel) { return kernel.device_type() == "GPU"; };
    const KernelList kernels = GetFilteredRegisteredKernels(is_cuda);
    for (const KernelDef& kernel : kernels.kernel()) {
      auto* substitute = new KernelDef(kernel);  // the registrar takes it
      substitute->set_priority(kernel.priority() + 1);
      kernel_factory::OpKernelRegistrar(substitute, "fake_gpu", std::make_unique<SubstituteFactory>());
    }
  }
} on_load;

}  // namespace fake_gpu
