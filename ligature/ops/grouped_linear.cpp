// Parameters, checks, and what is saved; the GEMMs are in grouped_operands.cpp.
#include "ligature/ops/grouped_linear.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>

#include "ligature/ops/add_extra_input.h"
#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"
#include "ligature/readable.h"
#include "ligature/recipes/model_init.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(GroupedLinear);

namespace {

int64_t rows_of(const ValueMeta& input) {
  return input.sizes.back() > 0 ? input.numel() / input.sizes.back() : 0;
}

bool any_of(const GradFlags& needs, size_t first, size_t count) {
  for (size_t i = first; i < first + count; ++i) {
    if (needs.param(i)) return true;
  }
  return false;
}

}  // namespace

void GroupedLinearImpl::check_options(const Options& given) const {
  const auto positive = [&](const char* name, int64_t value) {
    LIGATURE_CHECK(value > 0, "[", label(), "] ", name, " must be positive, got ", value);
  };
  positive("num_groups", given.num_groups);
  positive("in_features", given.in_features);
  positive("out_features", given.out_features);
}

GroupedLinearImpl::GroupedLinearImpl(Options options_)
    : Operation("GroupedLinear"), options(std::move(options_)) {
  check_options(options);
  LIGATURE_CHECK_STATE(!options.single_grouped_weight || quantized_model_init() == nullptr,
                       "[GroupedLinear] quantized_model_init keeps each group's weight with scales "
                       "of its own: it needs single_grouped_weight=false");
  const at::DimVector weight{options.out_features, options.in_features};
  if (options.single_grouped_weight && !options.single_grouped_bias) {
    if (options.bias) add_parameters("bias", {options.out_features}, false);
    add_parameters("weight", weight, true);
  } else {
    add_parameters("weight", weight, options.single_grouped_weight);
    if (options.bias) add_parameters("bias", {options.out_features}, options.single_grouped_bias);
  }
  for (size_t g = 0; !options.single_grouped_weight && g < num_weights(); ++g) {
    Tensor& w = parameters_["weight" + std::to_string(g)];
    w = new_weight(*this, w, g).set_requires_grad(true);
  }
}

// On a device those of all groups are parts of one buffer, which its kernels can use as one
// operand.
void GroupedLinearImpl::add_parameters(const std::string& name, at::DimVector sizes, bool single) {
  const at::TensorOptions where = options.tensor_options();
  at::DimVector all(sizes);
  all.insert(all.begin(), options.num_groups);
  if (single) {
    add_parameter(name, all, where);
    return;
  }
  const bool packed = !where.device().is_cpu() && !where.device().is_meta();
  const Tensor buffer = packed ? at::empty(all, where) : Tensor();
  torch::NoGradGuard no_grad;
  for (int64_t g = 0; g < options.num_groups; ++g) {
    const std::string own = name + std::to_string(g);
    if (!packed) {
      add_parameter(own, sizes, where);
      continue;
    }
    Tensor part = buffer[g].detach();
    initialize_parameter(own, part);
    register_parameter(own, part);
  }
}

// Weights as those of torch.nn.Linear, each group by itself; biases are zeros.
void GroupedLinearImpl::initialize_parameter(const std::string& name, Tensor& parameter) {
  if (name.starts_with("bias")) {
    parameter.zero_();
    return;
  }
  if (parameter.dim() == 2) {
    torch::nn::init::kaiming_uniform_(parameter, std::sqrt(5.0));
    return;
  }
  for (Tensor& group : parameter.unbind(0)) {
    torch::nn::init::kaiming_uniform_(group, std::sqrt(5.0));
  }
}

void GroupedLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::GroupedLinear(num_groups=" << options.num_groups
         << ", in_features=" << options.in_features << ", out_features=" << options.out_features
         << ")";
}

size_t GroupedLinearImpl::first_weight() const {
  return options.single_grouped_weight && !options.single_grouped_bias ? num_biases() : 0;
}

size_t GroupedLinearImpl::first_bias() const { return first_weight() == 0 ? num_weights() : 0; }

bool GroupedLinearImpl::weights_require_grad(const GradFlags& needs) const {
  return any_of(needs, first_weight(), num_weights());
}

bool GroupedLinearImpl::biases_require_grad(const GradFlags& needs) const {
  return any_of(needs, first_bias(), num_biases());
}

std::string GroupedLinearImpl::describe_extra_input(size_t index) const {
  return index == 0 ? "sizes of " + std::to_string(options.num_groups) + " groups" : "";
}

std::optional<OtherPlace> GroupedLinearImpl::other_place(const std::string& parameter) const {
  const bool is_bias = parameter.starts_with("bias");
  const std::string whole = is_bias ? "bias" : "weight";
  const bool single = is_bias ? options.single_grouped_bias : options.single_grouped_weight;
  OtherPlace place;
  for (int64_t g = 0; g < options.num_groups; ++g) {
    const std::string numbered = whole + std::to_string(g);
    if (single) {
      place.entries.push_back(numbered);
    } else if (parameter == numbered) {
      return OtherPlace{{whole}, g, options.num_groups};
    }
  }
  if (!single || parameter != whole) return std::nullopt;
  return place;
}

bool GroupedLinearImpl::takes_quantized_parameter(size_t index) const {
  return index >= first_weight() && index < first_weight() + num_weights();
}

std::vector<QuantizerRole> GroupedLinearImpl::forward_quantizer_roles() const {
  std::vector<QuantizerRole> roles;
  for (int64_t g = 0; g < options.num_groups; ++g) {
    roles.push_back({"linear", "input", label()});
    roles.push_back({"linear", "weight", label()});
  }
  return roles;
}

std::vector<QuantizerRole> GroupedLinearImpl::backward_quantizer_roles() const {
  return std::vector<QuantizerRole>(options.num_groups, {"linear", "grad_output", label()});
}

at::ScalarType GroupedLinearImpl::compute_dtype(const OpArgs& args) const {
  return under_autocast(args.params[first_weight()].scalar_type(), args.autocast_dtype);
}

namespace {

/// One parameter, or one per group: all alike.
void check_alike(const GroupedLinearImpl& op, const InferArgs& args, const char* what, size_t first,
                 size_t count, at::IntArrayRef group_sizes) {
  at::DimVector wanted(group_sizes);
  if (count == 1 && op.options.num_groups > 1) wanted.insert(wanted.begin(), op.options.num_groups);
  const Tensor& like = args.params[first];
  for (size_t i = 0; i < count; ++i) {
    const Tensor& p = args.params[first + i];
    const auto name = [&] { return what + (count > 1 ? std::to_string(i) : std::string()); };
    const bool single = count == 1 && p.dim() == static_cast<int64_t>(group_sizes.size()) + 1 &&
                        p.size(0) == op.options.num_groups && p.sizes().slice(1) == group_sizes;
    LIGATURE_CHECK(single || p.sizes() == at::IntArrayRef(wanted), "[", op.label(), "] ", name(),
                   " must be ", sizes_string(wanted), ", got ", sizes_string(p.sizes()));
    check_parameter(op, args.input, name().c_str(), p);
    LIGATURE_CHECK_STATE(p.scalar_type() == like.scalar_type(), "[", op.label(), "] ", name(),
                         " must have the dtype of ", what, "0, ", c10::toString(like.scalar_type()),
                         ", got ", c10::toString(p.scalar_type()));
    LIGATURE_CHECK_STATE((quantized_of(p) == nullptr) == (quantized_of(like) == nullptr), "[",
                         op.label(), "] ", name(), " must be in low precision just where ", what,
                         "0 is");
  }
}

}  // namespace

void GroupedLinearImpl::check_buffer(const InferArgs& args, const char* name,
                                     const ValueMeta& wanted) const {
  const Tensor buffer = args.kwargs != nullptr ? args.kwargs->tensor(name) : Tensor();
  if (!buffer.defined()) {
    const auto given = [&](const std::string& own) { return own == name; };
    const PlainValue* value = args.kwargs != nullptr ? args.kwargs->values.find(name) : nullptr;
    const bool none = value != nullptr && std::holds_alternative<std::monostate>(*value);
    LIGATURE_CHECK_TYPE(
        none || args.kwargs == nullptr ||
            std::none_of(args.kwargs->names.begin(), args.kwargs->names.end(), given),
        "[", label(), "] ", name, " must be a tensor");
    return;
  }
  const auto refuse = [&](bool good, const std::string& words, const std::string& got) {
    LIGATURE_CHECK(good, "[", label(), "] ", name, " must ", words, ", got ", got);
  };
  refuse(buffer.sizes() == at::IntArrayRef(wanted.sizes), "be " + sizes_string(wanted.sizes),
         sizes_string(buffer.sizes()));
  refuse(buffer.scalar_type() == wanted.dtype,
         std::string("have dtype ") + c10::toString(wanted.dtype),
         c10::toString(buffer.scalar_type()));
  refuse(buffer.device() == wanted.device, "be on " + wanted.device.str(), buffer.device().str());
  refuse(buffer.is_contiguous(), "be contiguous", "strides " + sizes_string(buffer.strides()));
  refuse(!buffer.requires_grad(), "not require a gradient", "one that does");
}

std::optional<InferResult> GroupedLinearImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  const auto& sizes = args.input.sizes;
  LIGATURE_CHECK(!sizes.empty() && sizes.back() == options.in_features, "[", label(),
                 "] input's last dimension must be in_features=", options.in_features, ", got ",
                 sizes_string(sizes));
  LIGATURE_CHECK_STATE(args.params.size() == num_weights() + num_biases(), "[", label(), "] takes ",
                       num_weights() + num_biases(), " parameters, got ", args.params.size());
  check_alike(*this, args, "weight", first_weight(), num_weights(),
              {options.out_features, options.in_features});
  if (options.bias) {
    check_alike(*this, args, "bias", first_bias(), num_biases(), {options.out_features});
  }
  const int64_t rows = rows_of(args.input);
  if (args.extra_inputs[0]) {
    const ValueMeta& splits = *args.extra_inputs[0];
    LIGATURE_CHECK_TYPE(at::isIntegralType(splits.dtype, /*includeBool=*/false), "[", label(),
                        "] split sizes must be integers, got ", to_string(splits));
    LIGATURE_CHECK(splits.sizes.size() == 1 && splits.sizes[0] == options.num_groups, "[", label(),
                   "] split sizes must be [num_groups=", options.num_groups, "], got ",
                   sizes_string(splits.sizes));
    const Tensor given = args.extra_values.empty() ? Tensor() : args.extra_values[0];
    if (given.defined() && given.is_cpu() && is_readable(given) && args.input.device != at::kMeta) {
      kernels::make_groups("[" + label() + "]", given, rows);
    }
  }
  if (scales_bias() && args.extra_inputs[1]) {
    const ValueMeta& scales = *args.extra_inputs[1];
    LIGATURE_CHECK_TYPE(at::isFloatingType(scales.dtype), "[", label(),
                        "] scales must have a floating dtype, got ", to_string(scales));
    LIGATURE_CHECK(scales.numel() == rows, "[", label(), "] scales must be one per row, [", rows,
                   "], got ", sizes_string(scales.sizes));
    LIGATURE_CHECK(scales.device == args.input.device, "[", label(),
                   "] input and scales must be on one device, got input on ",
                   args.input.device.str(), " and scales on ", scales.device.str());
  }
  InferResult result{args.input, {}};
  result.output.sizes.back() = options.out_features;
  result.output.dtype =
      under_autocast(args.params[first_weight()].scalar_type(), args.autocast_dtype);
  check_buffer(args, kOutputBuffer, result.output);
  check_buffer(args, kGradInputBuffer, args.input);
  return result;
}

// Of different sizes, the second one empty, with a row behind them if there are rows to spare.
Tensor GroupedLinearImpl::example_extra_input(size_t index, const ValueMeta& input) const {
  if (index != 0) return {};
  Tensor splits = at::zeros({options.num_groups}, at::kLong);
  auto sizes = splits.accessor<int64_t, 1>();
  const int64_t rows = rows_of(input);
  for (int64_t r = 0; r < rows - (rows > 3 ? 1 : 0); ++r) {
    const int64_t g = r * r % options.num_groups;
    ++sizes[g == 1 && options.num_groups > 2 ? 2 : g];
  }
  return splits;
}

kernels::Groups GroupedLinearImpl::groups_of(const Tensor& splits, int64_t rows,
                                             at::Device device) const {
  if (!device.is_meta()) return kernels::make_groups("[" + label() + "]", splits, rows);
  // Nothing is computed, so sizes on the CPU need not fit the rows.
  kernels::Groups groups{options.num_groups, rows, splits, {}};
  if (!splits.is_cpu()) return groups;
  groups.starts.assign(1, 0);
  groups.starts.resize(options.num_groups + 1, rows);
  return groups;
}

Tensor GroupedLinearImpl::output_buffer(const ValueMeta& input, const OpArgs& args) const {
  const Tensor buffer = args.kwargs != nullptr ? args.kwargs->tensor(kOutputBuffer) : Tensor();
  if (!buffer.defined()) return buffer;
  AddExtraInputImpl::mark_changed(buffer);
  return at::alias(buffer).view({rows_of(input), options.out_features});
}

FuserForwardResult GroupedLinearImpl::fuser_forward_compute(const Value& input, ArgsList args) {
  const OpArgs& own = args[0];
  const ValueMeta meta = ValueMeta::of(input);
  const int64_t rows = rows_of(meta);
  const Tensor out = output_buffer(meta, own);
  const Tensor x = prepare(input, compute_dtype(own)).view({rows, options.in_features});
  GroupedFwdArgs fwd =
      forward_args(x, {}, groups_of(own.extra_inputs[0], rows, input.device()), own);
  fwd.out = out;
  at::DimVector sizes(input.sizes());
  sizes.back() = options.out_features;
  FuserForwardResult result;
  result.output = forward(fwd).view(sizes);
  result.extra_outputs.resize(1);
  result.to_save.push_back(to_save(fwd, own));
  return result;
}

void GroupedLinearImpl::save_state(OperationContext& ctx, at::ScalarType input_dtype,
                                   const OpArgs& args) const {
  auto& state = ctx.state.as<GroupedLinearState>();
  state = {};
  state.dtype = compute_dtype(args);
  state.input_dtype = input_dtype;
  state.weight_dtype = args.params[first_weight()].scalar_type();
  if (options.bias) state.bias_dtype = args.params[first_bias()].scalar_type();
  state.calibrating = args.calibrating;
  const bool elsewhere = options.accumulate_into_main_grad || options.delay_wgrad_compute;
  if (elsewhere && weights_require_grad(args.requires_grad)) {
    for (size_t i = 0; i < num_weights(); ++i) {
      ctx.parameter_references.push_back(args.params[first_weight() + i]);
    }
  }
  if (args.kwargs == nullptr) return;
  if (const Tensor buffer = args.kwargs->tensor(kGradInputBuffer); buffer.defined()) {
    ctx.parameter_references.push_back(buffer);
    state.writes_grad_input = true;
  }
}

void GroupedLinearImpl::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                               FuserForwardResult& result, ArgsList args) {
  const Value x = weights_require_grad(args[0].requires_grad) ? input : Value();
  save_ctx(*ctxs[0], x, input.dtype(), result.to_save[0], args[0]);
}

// As in a linear: the input and the weights are saved as they came in.
void GroupedLinearImpl::save_ctx(OperationContext& ctx, const Value& x, at::ScalarType input_dtype,
                                 ToSave& to_save, const OpArgs& args) const {
  const GradFlags& needs = args.requires_grad;
  save_state(ctx, input_dtype, args);
  std::vector<Value> saved(kNumFixed);
  std::vector<Value>& made = to_save.tensors;
  saved[kX] = x;
  saved[kSplits] = args.extra_inputs[0];
  if (!made.empty()) saved[kInputScales] = made[0];
  if (scales_bias() && (needs.extra_input(1) || biases_require_grad(needs))) {
    saved[kRowScale] = args.extra_inputs[1];
  }
  if (scales_bias() && needs.extra_input(1)) {
    ctx.state.as<GroupedLinearState>().num_saved_biases = static_cast<int64_t>(num_biases());
    for (size_t i = 0; i < num_biases(); ++i) saved.emplace_back(args.params[first_bias() + i]);
  }
  if (needs.input && made.size() > 1) {
    for (size_t g = 1; g < made.size(); ++g) saved.push_back(std::move(made[g]));
  } else if (needs.input) {
    for (size_t i = 0; i < num_weights(); ++i) saved.emplace_back(args.params[first_weight() + i]);
  }
  ctx.save_for_backward(std::move(saved));
}

const Tensor& GroupedLinearImpl::saved_splits(const OperationContext& ctx) {
  return ctx.saved_tensor(kSplits);
}

at::ArrayRef<Value> GroupedLinearImpl::saved_weights(const OperationContext& ctx) {
  const auto biases = ctx.state.as<GroupedLinearState>().num_saved_biases.value_or(0);
  return at::ArrayRef<Value>(ctx.saved()).slice(kNumFixed + biases);
}

Tensor GroupedLinearImpl::release_input(OperationContext& ctx) const {
  const Value x = ctx.release_saved(kX).value;
  const auto dtype = ctx.state.as<GroupedLinearState>().dtype.value_or(x.dtype());
  return prepare(x, dtype).view({rows_of(ValueMeta::of(x)), options.in_features});
}

void GroupedLinearImpl::put_bias_grads(const GroupedBwdArgs& args, const OperationContext& ctx,
                                       std::vector<Tensor>& grads,
                                       std::vector<Tensor>& grad_extra_inputs) const {
  const GradFlags& needs = ctx.requires_grad;
  const GroupedLinearState state = ctx.state.as<GroupedLinearState>();
  const Tensor& row_scale = ctx.saved_tensor(kRowScale);
  if (biases_require_grad(needs)) {
    const at::ScalarType wide = args.dtype == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor scales =
        row_scale.defined() ? prepare(row_scale, wide).view({args.groups.rows}) : Tensor();
    const Tensor db = cast(kernels::grouped_bias_grad(args.dy, args.groups, scales, args.dy_index),
                           state.bias_dtype.value_or(args.dtype));
    put_needed(options.single_grouped_bias ? std::vector<Tensor>{db} : db.unbind(0), first_bias(),
               needs, grads);
  }
  const int64_t num_saved_biases = state.num_saved_biases.value_or(0);
  if (!needs.extra_input(1) || num_saved_biases == 0) return;
  std::vector<Tensor> biases;
  for (int64_t i = 0; i < num_saved_biases; ++i) {
    biases.push_back(prepare(ctx.saved_value(kNumFixed + i), args.dtype));
  }
  if (options.single_grouped_bias) biases = biases[0].unbind(0);
  const Tensor dscale = kernels::grouped_scale_grad(args.dy, biases, args.groups, args.dy_index);
  grad_extra_inputs[1] = cast(dscale, row_scale.scalar_type()).view(row_scale.sizes());
}

FuserBackwardResult GroupedLinearImpl::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                      GradList) {
  OperationContext& ctx = *ctxs[0];
  const auto dtype = ctx.state.as<GroupedLinearState>().dtype.value_or(grad_output.dtype());
  const int64_t rows = rows_of(ValueMeta::of(grad_output));
  const Tensor dy = prepare(grad_output, dtype).view({rows, options.out_features});
  GroupedBwdArgs bwd =
      backward_args(ctx, dy, {}, groups_of(saved_splits(ctx), rows, grad_output.device()));

  FuserBackwardResult out;
  out.grad_params = {std::vector<Tensor>(num_weights() + num_biases())};
  out.grad_extra_inputs = {std::vector<Tensor>(num_extra_inputs())};
  put_bias_grads(bwd, ctx, out.grad_params[0], out.grad_extra_inputs[0]);
  if (bwd.weight_requires_grad) {
    bwd.x = release_input(ctx);
    put_weight_grads(bwd, ctx, out.grad_params[0]);
    bwd.x = Tensor();
  }
  if (!bwd.input_requires_grad) return out;
  at::DimVector sizes(grad_output.sizes());
  sizes.back() = options.in_features;
  out.grad_input = input_grad(bwd).view(sizes);
  return out;
}

std::string GroupedLinearImpl::complete_context(OperationContext& ctx, const OpArgs&) const {
  if (ctx.state.as<GroupedLinearState>().dtype && ctx.num_saved() >= kNumFixed) return {};
  return expected("what its own fuser_forward_save_ctx saves", count_of(ctx));
}

}  // namespace ligature
