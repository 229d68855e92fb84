// What torch's functions do with tensors that stand for quantized ones. Any function works: it is
// given the values in high precision, and what it wrote into them is quantized again. Only the few
// registered at the end treat the quantized data itself.
#include "ligature/quantized/torch_functions.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "ligature/meta.h"
#include "ligature/quantized/writes.h"

namespace ligature {
namespace {

using torch::autograd::AutogradContext;
using torch::jit::Stack;

bool is_tracked(const Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

Tensor values_of(const Tensor& wrapper) { return quantized_of(wrapper)->dequantize(); }

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
    write_quantized(quantized_of(given.wrapper), Value(given.values));
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

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call call(op.schema());
  call.lower(*stack);
  op.callBoxed(stack);
  call.raise(*stack);
}

// ---- functions that treat the quantized data itself

Tensor same_data(const Tensor& self) { return wrap_quantized(quantized_of(self)); }

Tensor each_part(const Tensor& self, const std::function<Tensor(const Tensor&)>& f,
                 at::ScalarType dtype) {
  return wrap_quantized(quantized_of(self)->map(f)->with_dtype(dtype));
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
  const QuantizedPtr other = quantized_of(from);
  if (other != nullptr && same_layout(*to, *other)) {
    write_quantized(to, other);
  } else {
    write_quantized(to, Value(plain_or_values(from).expand(self.sizes())));
  }
  return self;
}

/// A view with the same last dimension; another is of the values.
template <class F>
Tensor reshaped(const Tensor& self, const F& f) {
  const Tensor shape = f(at::empty(self.sizes(), at::kMeta));
  if (shape.dim() == 0 || shape.size(-1) != self.size(-1)) return f(values_of(self));
  return wrap_quantized(quantized_of(self)->view(shape.sizes().vec()));
}

Tensor view(const Tensor& self, c10::SymIntArrayRef sizes) {
  return reshaped(self, [&](const Tensor& t) { return t.view_symint(sizes); });
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef) {
  return view(self, sizes);
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

/// Its gradient passes unchanged, which torch does not know of its own quantized tensors.
struct Dequantize : torch::autograd::Function<Dequantize> {
  static Tensor forward(AutogradContext* ctx, const Tensor& from) {
    ctx->saved_data["dtype"] = static_cast<int64_t>(from.scalar_type());
    return values_of(from);
  }
  static torch::autograd::variable_list backward(AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return {Tensor()};
    return {grads[0].to(static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt()))};
  }
};

Tensor dequantize(const Tensor& self) {
  return is_tracked(self) ? Dequantize::apply(self) : values_of(self);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse3, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) {
  m.impl("detach", same_data);
  m.impl("alias", same_data);
  m.impl("clone", clone);
  m.impl("_to_copy", to_copy);
  m.impl("copy_", copy_);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unsqueeze", unsqueeze);
  m.impl("squeeze.dim", squeeze);
  m.impl("empty_like", empty_like);
  m.impl("dequantize.self", values_of);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { m.impl("dequantize.self", dequantize); }

}  // namespace ligature
