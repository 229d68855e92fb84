// What torch's functions do with tensors that stand for quantized ones. Any function works: it is
// given the values in high precision, and what it wrote into them is quantized again. Only the few
// registered at the end treat the quantized data itself.
#include "ligature/quantization/torch_functions.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "ligature/quantization/weights.h"

namespace ligature {
namespace {

using torch::autograd::AutogradContext;
using torch::jit::Stack;

/// Something made from a quantized tensor, of the same values: gradients pass unchanged.
struct Derived : torch::autograd::Function<Derived> {
  static Tensor forward(AutogradContext* ctx, const Tensor& from,
                        const std::function<Tensor()>& make) {
    ctx->saved_data["sizes"] = from.sizes().vec();
    ctx->saved_data["dtype"] = static_cast<int64_t>(from.scalar_type());
    ctx->saved_data["device"] = from.device();
    const at::AutoDispatchBelowADInplaceOrView no_views;  // of what is made and thrown away
    return make();
  }
  static torch::autograd::variable_list backward(AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor()};
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    return {grads[0]
                .to(ctx->saved_data["device"].toDevice(), dtype)
                .reshape(ctx->saved_data["sizes"].toIntVector()),
            Tensor()};
  }
};

bool is_tracked(const Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

Tensor derive(const Tensor& from, const std::function<Tensor()>& make) {
  return is_tracked(from) ? Derived::apply(from, make) : make();
}

Tensor values_of(const Tensor& wrapper) {
  const QuantizedPtr quantized = quantized_of(wrapper);
  return derive(wrapper, [quantized] { return quantized->dequantize(); });
}

Tensor plain_or_values(const Tensor& tensor) {
  return quantized_of(tensor) != nullptr ? values_of(tensor) : tensor;
}

/// The values of every quantized argument of one call, and what becomes of them.
class Call {
 public:
  explicit Call(const c10::FunctionSchema& schema) : schema_(schema) {}

  void lower(Stack& stack) {
    const auto& arguments = schema_.arguments();
    const size_t first = stack.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      replace(stack[first + i], alias != nullptr && alias->isWrite());
    }
  }

  /// Quantizes what was written, and puts the quantized tensors back into the results.
  void raise(Stack& stack) {
    for (const Given& given : given_) {
      if (given.written) write_back(given);
    }
    const size_t count = schema_.returns().size();
    for (size_t i = stack.size() - count; i < stack.size(); ++i) restore(stack[i]);
  }

 private:
  struct Given {
    Tensor wrapper;
    Tensor values;
    bool written;
  };

  Tensor lowered(const Tensor& tensor, bool written) {
    if (quantized_of(tensor) == nullptr) return tensor;
    for (Given& given : given_) {
      if (!given.wrapper.is_same(tensor)) continue;
      given.written = given.written || written;
      return given.values;
    }
    TORCH_CHECK(!written || !is_tracked(tensor) || !tensor.is_leaf(),
                "a leaf Variable that requires grad is being used in an in-place operation.");
    given_.push_back({tensor, values_of(tensor), written});
    return given_.back().values;
  }

  void replace(c10::IValue& value, bool written) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = lowered(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list = value.toTensorList().copy();
      for (size_t i = 0; i < list.size(); ++i) list.set(i, lowered(list.get(i), written));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list = value.toOptionalTensorList().copy();
      for (size_t i = 0; i < list.size(); ++i) {
        const std::optional<Tensor> item = list.get(i);
        if (item) list.set(i, lowered(*item, written));
      }
      value = std::move(list);
    }
  }

  void write_back(const Given& given) const {
    LIGATURE_CHECK_STATE(given.values.sizes() == given.wrapper.sizes(), schema_.name(),
                         " must leave a quantized tensor of shape ",
                         sizes_string(given.wrapper.sizes()), " as it is, got ",
                         sizes_string(given.values.sizes()));
    const QuantizedPtr quantized = quantized_of(given.wrapper);
    write_quantized(quantized, Value(given.values.detach()));
    if (!given.wrapper.is_inference()) given.wrapper.unsafeGetTensorImpl()->bump_version();
    if (given.values.grad_fn() != nullptr) {
      torch::autograd::impl::set_gradient_edge(given.wrapper,
                                               torch::autograd::impl::gradient_edge(given.values));
    }
  }

  void restore(c10::IValue& value) const {
    if (!value.isTensor()) return;
    for (const Given& given : given_) {
      if (given.written && value.toTensor().is_same(given.values)) value = given.wrapper;
    }
  }

  const c10::FunctionSchema& schema_;
  std::vector<Given> given_;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  // A function made of others is taken apart: those are the ones that may keep the quantized data.
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kWrapperKey),
                       stack);
    return;
  }
  Call call(op.schema());
  call.lower(*stack);
  op.callBoxed(stack);
  call.raise(*stack);
}

// ---- functions that treat the quantized data itself

Tensor detach(const Tensor& self) { return wrap_quantized(quantized_of(self)); }

Tensor alias(const Tensor& self) {
  const QuantizedPtr quantized = quantized_of(self);
  return derive(self, [quantized] { return wrap_quantized(quantized); });
}

Tensor each_part(const Tensor& self, const std::function<Tensor(const Tensor&)>& f,
                 at::ScalarType dtype) {
  const QuantizedPtr quantized = quantized_of(self);
  return derive(self, [quantized, f, dtype] {
    at::NoGradGuard no_grad;
    return wrap_quantized(quantized->map(f)->with_dtype(dtype));
  });
}

bool keeps_order(std::optional<at::MemoryFormat> format) {
  return !format || *format == at::MemoryFormat::Preserve ||
         *format == at::MemoryFormat::Contiguous;
}

Tensor clone(const Tensor& self, std::optional<at::MemoryFormat> format) {
  if (!keeps_order(format)) return values_of(self).clone(format);
  return each_part(self, [](const Tensor& part) { return part.clone(); }, self.scalar_type());
}

Tensor to_copy(const Tensor& self, std::optional<at::ScalarType> dtype,
               std::optional<at::Layout> layout, std::optional<at::Device> device,
               std::optional<bool> pin_memory, bool non_blocking,
               std::optional<at::MemoryFormat> format) {
  const at::ScalarType to = dtype.value_or(self.scalar_type());
  const bool fits = to == at::kFloat || to == at::kBFloat16 || to == at::kHalf;
  if (!fits || layout.value_or(at::kStrided) != at::kStrided || !keeps_order(format)) {
    return at::_to_copy(values_of(self), dtype, layout, device, pin_memory, non_blocking, format);
  }
  return each_part(
      self,
      [=](const Tensor& part) {
        return at::_to_copy(part, std::nullopt, std::nullopt, device, pin_memory, non_blocking,
                            std::nullopt);
      },
      to);
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  const QuantizedPtr to = quantized_of(self);
  if (to == nullptr) return self.copy_(plain_or_values(from), non_blocking);
  TORCH_CHECK(!is_tracked(self) || !self.is_leaf(),
              "a leaf Variable that requires grad is being used in an in-place operation.");
  const QuantizedPtr other = quantized_of(from);
  if (other != nullptr && same_layout(*to, *other)) {
    write_quantized(to, other);
  } else {
    write_quantized(to, Value(plain_or_values(from.detach()).expand(self.sizes())));
  }
  if (!self.is_inference()) self.unsafeGetTensorImpl()->bump_version();
  if (at::GradMode::is_enabled() && (from.requires_grad() || self.grad_fn() != nullptr)) {
    const Tensor passed = plain_or_values(from).to(self.scalar_type()).expand(self.sizes());
    torch::autograd::impl::set_gradient_edge(
        self, passed.requires_grad() ? torch::autograd::impl::gradient_edge(passed)
                                     : torch::autograd::Edge());
  }
  return self;
}

/// A view with the same last dimension; another is of the values.
template <class F>
Tensor reshaped(const Tensor& self, const F& f) {
  const Tensor shape = f(at::empty(self.sizes(), at::kMeta));
  if (shape.dim() == 0 || shape.size(-1) != self.size(-1)) return f(values_of(self));
  const QuantizedPtr viewed = quantized_of(self)->view(shape.sizes().vec());
  return derive(self, [viewed] { return wrap_quantized(viewed); });
}

Tensor view(const Tensor& self, c10::SymIntArrayRef sizes) {
  return reshaped(self, [&](const Tensor& t) { return t.view_symint(sizes); });
}

Tensor unsqueeze(const Tensor& self, int64_t dim) {
  return reshaped(self, [&](const Tensor& t) { return t.unsqueeze(dim); });
}

Tensor squeeze(const Tensor& self, int64_t dim) {
  return reshaped(self, [&](const Tensor& t) { return t.squeeze(dim); });
}

Tensor empty_like(const Tensor& self, std::optional<at::ScalarType> dtype,
                  std::optional<at::Layout> layout, std::optional<at::Device> device,
                  std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  const Tensor pattern = at::empty(self.sizes(), self.options().device(at::kMeta));
  return at::empty_like(pattern, dtype, layout, device.value_or(self.device()), pin_memory, format);
}

Tensor dequantize(const Tensor& self) { return values_of(self); }

// A quantized tensor may take over another's data, and no other kind of tensor's.
bool has_compatible_type(const Tensor& self, const Tensor& from) {
  return quantized_of(self) != nullptr && quantized_of(from) != nullptr;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  m.impl("detach", detach);
  m.impl("alias", alias);
  m.impl("clone", clone);
  m.impl("_to_copy", to_copy);
  m.impl("copy_", copy_);
  m.impl("view", view);
  m.impl("unsqueeze", unsqueeze);
  m.impl("squeeze.dim", squeeze);
  m.impl("empty_like", empty_like);
  m.impl("dequantize.self", dequantize);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
}

}  // namespace ligature
