// Which kernels run, for pictures of a plan. While a log is open on this thread, every kernel notes
// its name and backend, and every ATen call that computes something is noted too, alone or as part
// of the kernel it was made for. Without a log a kernel pays one look at a thread-local pointer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "ligature/base/modes.h"
#include "ligature/kernels/devices.h"

namespace ligature::kernels {

using at::Tensor;

/// What travels between processes.
struct CollectiveCall {
  std::string op;     ///< the label of the operation it is for
  std::string group;  ///< its name
  int64_t ranks = 1;
  int64_t bytes = 0;     ///< that this process gives
  std::string format;    ///< "bfloat16", "fp8 e4m3"
  bool awaited = false;  ///< this is where it is awaited, not where it starts
};

struct KernelCall {
  std::string name;
  std::string backend;  ///< "cpu", "cuda", "aten", "python" for a Python op, or that of a group
  /// The ATen calls of a kernel that is made of them on every device. What the backend aten does in
  /// place of another is not known before it is done, and so not told.
  std::vector<std::string> calls;
  bool syncs = false;  ///< the host waits for the device
  std::optional<CollectiveCall> collective{};
};

/// The backend that serves kernels of our own on this kind of device.
const char* backend_name(at::DeviceType device, at::ScalarType dtype = at::kFloat);

class KernelLog {
 public:
  /// `device`: where the tensors are, or what tensors without memory stand for.
  explicit KernelLog(at::DeviceType device);
  ~KernelLog();
  KernelLog(const KernelLog&) = delete;
  KernelLog& operator=(const KernelLog&) = delete;

  std::vector<KernelCall> take() { return std::move(calls_); }
  /// Multiplications and additions of the GEMMs so far.
  int64_t flops() const { return flops_; }

 private:
  friend class KernelScope;
  friend struct AtenObserver;
  friend void note_sync(const std::string& what);
  friend void note_collective(const std::string& name, const std::string& backend,
                              CollectiveCall call);

  at::DeviceType device_;
  MetaStandsFor stands_for_;
  std::vector<KernelCall> calls_;
  int64_t flops_ = 0;
  bool in_kernel_ = false;
  bool notes_calls_ = false;          ///< of the kernel it is in
  std::optional<ModesHidden> alone_;  ///< while in a kernel: it is one, whatever it is made of
  int aten_depth_ = 0;
  uint64_t callback_ = 0;
  KernelLog* outer_ = nullptr;
};

bool is_log_open();

/// The host is about to wait for a device: noted with the kernel that is running, if any, and
/// refused where a NoSyncScope lives. `what`: "[GroupedLinear] the split sizes on cuda:0".
void note_sync(const std::string& what);

/// A collective starts, or is awaited.
void note_collective(const std::string& name, const std::string& backend, CollectiveCall call);

/// While it lives, if `on`, this thread's kernels may not wait for a device.
class NoSyncScope {
 public:
  explicit NoSyncScope(bool on);
  ~NoSyncScope();
  NoSyncScope(const NoSyncScope&) = delete;
  NoSyncScope& operator=(const NoSyncScope&) = delete;

 private:
  bool outer_;
};

/// In a kernel's entry function, at its beginning.
class KernelScope {
 public:
  /// For a kernel that is served alike whatever the dtype.
  explicit KernelScope(const char* name) { enter(name, at::kFloat, nullptr); }
  /// `x`: by its dtype a backend is chosen.
  KernelScope(const char* name, const Tensor& x) { enter(name, x.scalar_type(), nullptr); }
  /// For a kernel that is this backend's on every device.
  KernelScope(const char* name, const char* backend) { enter(name, at::kFloat, backend); }
  /// `find_backend`: tells whose it is; asked only while a log is open.
  template <class F>
    requires std::is_invocable_r_v<const char*, F>
  KernelScope(const char* name, const F& find_backend) {
    if (is_log_open()) enter(name, at::kFloat, find_backend());
  }
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

  /// A call that is left out because there is nothing to compute with.
  void stands_for(const char* aten_call);
  /// It is a GEMM of an operand of `numel` elements with one of `columns` columns.
  void gemm(int64_t numel, int64_t columns) {
    if (log_ != nullptr) log_->flops_ += 2 * numel * columns;
  }
  /// Does anybody want to know?
  bool is_logged() const { return log_ != nullptr; }

 private:
  void enter(const char* name, at::ScalarType dtype, const char* backend);
  KernelLog* log_ = nullptr;
};

}  // namespace ligature::kernels
