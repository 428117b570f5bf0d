// Tensors on "cuda:0" and "cuda:1" whose memory is the host's. Every operation of torch on them runs in torch's CPU
// kernels, on CPU tensors that share their memory. Mixing devices, or generators, fails as it does on a GPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Storage;
using c10::Stream;

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr DeviceIndex NUM_DEVICES = 2;
thread_local DeviceIndex current_device = 0;

Device on(DeviceIndex index) { return Device(CUDA, index < 0 ? current_device : index); }

// ---------------------------------------------------------------------------------------------------- memory

struct Range {
  uintptr_t end;
  DeviceIndex device;
};
std::map<uintptr_t, Range> memory;  // of the GPUs, by its first address
std::mutex memory_lock;

struct Allocation {
  Storage host;  // keeps the memory
};

// A storage of `device` that has the memory of `host`.
c10::DataPtr claim(const Storage& host, Device device) {
  auto first = reinterpret_cast<uintptr_t>(host.data());
  std::lock_guard<std::mutex> lock(memory_lock);
  if (host.nbytes()) memory[first] = {first + host.nbytes(), device.index()};
  auto release = [](void* context) {
    auto* allocation = static_cast<Allocation*>(context);
    std::lock_guard<std::mutex> lock(memory_lock);
    memory.erase(reinterpret_cast<uintptr_t>(allocation->host.data()));
    delete allocation;
  };
  return {host.mutable_data(), new Allocation{host}, release, device};
}

// A CPU storage that has the memory of `gpu`; if it grows it moves elsewhere.
Storage borrow(const Storage& gpu) {
  c10::DataPtr data(gpu.mutable_data(), c10::Device(c10::kCPU));
  return Storage(Storage::use_byte_size_t(), gpu.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
}

at::Tensor same_view(const at::Tensor& of, const Storage& storage, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), of.dtype());
  tensor.unsafeGetTensorImpl()->set_storage_offset(of.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(of.sym_sizes(), of.sym_strides());
  return tensor;
}

// ---------------------------------------------------------------------------------------------------- generators

struct GpuGenerator : at::CPUGeneratorImpl {
  explicit GpuGenerator(DeviceIndex index) { device_ = on(index); }
  void lend_to(Device device) { device_ = device; }
};

// ---------------------------------------------------------------------------------------------------- operations

// One call of an operator: its arguments go to the CPU, its results come back.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : name_(op.schema().name()) {}
  ~Call() {
    for (auto& [generator, device] : generators_) generator->lend_to(device);
  }

  void look_at(const IValue& value) {
    if (value.isTensor()) {
      const auto& t = value.toTensor();
      if (!t.defined()) return;
      (t.is_cuda() ? on_gpu_ : on_cpu_).push_back(t);
    } else if (value.isList()) {
      for (const IValue& element : value.toList()) look_at(element);
    } else if (value.isDevice()) {
      device_ = value.toDevice().is_cuda() ? on(value.toDevice().index()) : value.toDevice();
    } else if (value.isGenerator()) {
      generator_ = value.toGenerator();
    }
  }

  // As a GPU has it: all on one device, except numbers, what is copied, and indices.
  void check() {
    if (!device_ && on_gpu_.size()) device_ = on_gpu_[0].device();
    if (generator_ && generator_->device().type() != device_->type()) {
      TORCH_CHECK(false, "Expected a '", device_->type(), "' device type for generator but found '",
                  generator_->device().type(), "'");
    }
    if (name_ == "aten::copy_") return;
    for (const auto& t : on_gpu_) {
      TORCH_CHECK(t.device() == on_gpu_[0].device(), "Expected all tensors to be on the same device, but found ",
                  "at least two devices, ", on_gpu_[0].device(), " and ", t.device(), "! (", name_, ")");
    }
    bool indexes = name_.find("index") != std::string::npos;
    for (const auto& t : on_cpu_) {
      bool allowed = t.dim() == 0 || (indexes && (t.scalar_type() == at::kLong || t.scalar_type() == at::kBool));
      TORCH_CHECK(allowed || on_gpu_.empty(), "Expected all tensors to be on the same device, but found at least ",
                  "two devices, ", on_gpu_.empty() ? "" : on_gpu_[0].device().str(), " and cpu! (", name_, ")");
    }
  }

  IValue to_cpu(const IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
      const auto& gpu = value.toTensor();
      auto [place, is_new] = borrowed_.try_emplace(gpu.storage().unsafeGetStorageImpl());
      if (is_new) place->second = borrow(gpu.storage());
      auto cpu = same_view(gpu, place->second, c10::DispatchKey::CPU);
      pairs_.emplace_back(gpu, cpu);
      return cpu;
    }
    if (value.isTensorList() || value.isOptionalTensorList()) {
      auto list = value.toList().copy();
      for (size_t i = 0; i < list.size(); ++i) list.set(i, to_cpu(list.get(i)));
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return Device(c10::kCPU);
    if (value.isGenerator()) {
      if (auto* generator = dynamic_cast<GpuGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())) {
        generators_.emplace_back(generator, generator->device());
        generator->lend_to(c10::Device(c10::kCPU));
      }
    }
    return value;
  }

  // What an operator with `out=` has resized is so on the GPU too.
  void take_over_resized() {
    for (auto& [gpu, cpu] : pairs_) {
      if (cpu.storage().data() != gpu.storage().data() || cpu.storage().nbytes() != gpu.storage().nbytes()) {
        gpu.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(claim(cpu.storage(), gpu.device()));
        gpu.storage().set_nbytes(cpu.storage().nbytes());
      }
      if (cpu.sizes() != gpu.sizes() || cpu.strides() != gpu.strides())
        gpu.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sym_sizes(), cpu.sym_strides(), cpu.sym_storage_offset());
    }
  }

  IValue to_gpu(const IValue& value) {
    if (value.isList()) {
      auto list = value.toList();
      for (size_t i = 0; i < list.size(); ++i) list.set(i, to_gpu(list.get(i)));
      return list;
    }
    if (!value.isTensor() || !value.toTensor().defined() || !device_->is_cuda()) return value;
    const auto& cpu = value.toTensor();
    for (auto& [gpu, alias] : pairs_)
      if (alias.is_same(cpu)) return gpu;
    for (auto& given : on_cpu_)
      if (given.is_same(cpu)) return value;
    for (auto& [gpu, alias] : pairs_)  // a view
      if (alias.storage().is_alias_of(cpu.storage())) return same_view(cpu, gpu.storage(), c10::DispatchKey::CUDA);
    auto [place, is_new] = made_.try_emplace(cpu.storage().unsafeGetStorageImpl());
    if (is_new)
      place->second = Storage(Storage::use_byte_size_t(), cpu.storage().nbytes(), claim(cpu.storage(), *device_),
                              c10::GetCPUAllocator(), true);
    return same_view(cpu, place->second, c10::DispatchKey::CUDA);
  }

 private:
  std::string name_;
  std::vector<at::Tensor> on_gpu_, on_cpu_;
  std::optional<Device> device_;
  std::optional<at::Generator> generator_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // GPU tensor, CPU tensor with its memory
  std::map<c10::StorageImpl*, Storage> borrowed_, made_;
  std::vector<std::pair<GpuGenerator*, Device>> generators_;
};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Call call(op);
  size_t num_arguments = op.schema().arguments().size();
  for (const IValue& value : torch::jit::last(*stack, num_arguments)) call.look_at(value);
  call.check();
  for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i) (*stack)[i] = call.to_cpu((*stack)[i]);
  op.callBoxed(stack);
  call.take_over_resized();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    (*stack)[i] = call.to_gpu((*stack)[i]);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

// ---------------------------------------------------------------------------------------------------- devices

struct Guard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override { return on(std::exchange(current_device, device.index())); }
  Device getDevice() const override { return on(-1); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override { *event = &memory; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  long versionCuDNN() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { ::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(::current_device, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<GpuGenerator>(index); }
};
}  // namespace

namespace at {  // before torch's own, in a torch that is built for CUDA
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}

// ---------------------------------------------------------------------------------------------------- for Python

// After `import torch`: from then on, all is ours, also in a torch that is built for CUDA and has kernels of its own.
extern "C" void gpu_take_over() {
  static c10::impl::DeviceGuardImplRegistrar guard(CUDA, new Guard);
  static std::vector<c10::RegistrationHandleRAII> kept;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames())
    if (auto op = dispatcher.findOp(name);
        name.name.rfind("aten::", 0) == 0 && op && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA))
      kept.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                             c10::KernelFunction::makeFromBoxedFunction<&on_the_cpu>(), {}, {}, ""));
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  aten.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  aten.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, Storage)>(at::native::set_));
  aten.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

extern "C" int gpu_current_device() { return current_device; }
extern "C" int gpu_exchange_device(int index) { return std::exchange(current_device, index); }

// The device whose memory an address lies in, or -1.
extern "C" int gpu_of_address(uintptr_t address) {
  std::lock_guard<std::mutex> lock(memory_lock);
  auto after = memory.upper_bound(address);
  if (after == memory.begin()) return -1;
  auto [first, range] = *std::prev(after);
  return address < range.end ? range.device : -1;
}
