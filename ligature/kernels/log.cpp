#include "ligature/kernels/log.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <string_view>

#include "ligature/kernels/backend.h"
#include "ligature/kernels/run_context.h"

namespace ligature::kernels {

namespace {

bool starts_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

/// Views, allocations and questions compute nothing; a composite is the calls inside it.
bool computes(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (!name || !starts_with(name->name, "aten::")) return false;
  for (const char* start : {"aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::resize_",
                            "aten::_reshape_alias"}) {
    if (starts_with(name->name, start)) return false;
  }
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  bool tensor = false;
  for (const auto& result : op->schema().returns()) {
    const auto* alias = result.alias_info();
    if (alias != nullptr && !alias->isWrite()) return false;
    tensor = tensor || result.type()->kind() == c10::TypeKind::TensorType;
  }
  return tensor;
}

}  // namespace

struct AtenObserver {
  struct Inside : at::ObserverContext {};

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    KernelLog* log = run_context().log;
    if (log == nullptr || (log->aten_depth_ == 0 && !computes(call))) return nullptr;
    if (log->aten_depth_++ == 0) {
      const std::string name = call.operator_name()->name;
      if (!log->in_kernel_) {
        log->calls_.push_back({name, "aten", {}});
      } else if (log->notes_calls_) {
        log->calls_.back().calls.push_back(name);
      }
    }
    return std::make_unique<Inside>();
  }

  static void end(const at::RecordFunction&, at::ObserverContext* inside) {
    if (inside != nullptr && run_context().log != nullptr) --run_context().log->aten_depth_;
  }
};

const char* backend_name(at::DeviceType device, at::ScalarType dtype) {
  return backend_for(device, dtype).name;
}

KernelLog::KernelLog(at::DeviceType device)
    : device_(device), stands_for_(device), outer_(run_context().log) {
  run_context().log = this;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&AtenObserver::begin, &AtenObserver::end)
          .scopes({at::RecordScope::FUNCTION}));
}

KernelLog::~KernelLog() {
  at::removeCallback(callback_);
  run_context().log = outer_;
}

bool is_log_open() { return run_context().log != nullptr; }

void note_sync(const std::string& what) {
  KernelLog* log = run_context().log;
  if (log != nullptr) {
    if (!log->in_kernel_) log->calls_.push_back({"read_split_sizes", "host", {}});
    log->calls_.back().syncs = true;
  }
  LIGATURE_CHECK_STATE(!run_context().no_sync, what,
                       " have to be read by the host, which waits for the device; strict forbids "
                       "it ('no host sync')");
}

void note_collective(const std::string& name, const std::string& backend, CollectiveCall call) {
  KernelLog* log = run_context().log;
  if (log == nullptr) return;
  log->calls_.push_back({name, backend, {}});
  log->calls_.back().collective = std::move(call);
}

NoSyncScope::NoSyncScope(bool on) : outer_(run_context().no_sync) {
  run_context().no_sync = outer_ || on;
}

NoSyncScope::~NoSyncScope() { run_context().no_sync = outer_; }

void KernelScope::enter(const char* name, at::ScalarType dtype, const char* backend) {
  KernelLog* log = run_context().log;
  if (log == nullptr || log->in_kernel_) return;
  log_ = log;
  log_->alone_.emplace();
  log_->in_kernel_ = true;
  log_->notes_calls_ = backend != nullptr && std::string_view(backend) == "aten";
  log_->calls_.push_back(
      {name, backend != nullptr ? backend : backend_name(log_->device_, dtype), {}});
}

void KernelScope::stands_for(const char* aten_call) {
  if (log_ != nullptr) log_->calls_.back().calls.emplace_back(aten_call);
}

KernelScope::~KernelScope() {
  if (log_ == nullptr) return;
  log_->in_kernel_ = false;
  log_->alone_.reset();
}

}  // namespace ligature::kernels
