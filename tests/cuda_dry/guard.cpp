// Stands in for the parts of PyTorch's CUDA library that its CPU library asks for, so that fake tensors can be "on CUDA"
// where there is no card and PyTorch is built without CUDA. Preloaded; nothing is ever computed on the device.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct Guard : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device only() const { return Device(DeviceType::CUDA, 0); }
  Stream stream() const { return Stream(Stream::DEFAULT, only()); }
  Device getDevice() const override { return only(); }
  Device exchangeDevice(Device) const override { return only(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
};

struct Hooks : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

static Guard guard;

extern "C" void register_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
}

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static Hooks* hooks = new Hooks();
  return *hooks;
}
}  // namespace at::detail

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator
