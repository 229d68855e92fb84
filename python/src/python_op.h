// Operations written in Python, among those written in C++: each calls the methods of its
// Python object and holds the GIL only for that.
#pragma once

#include <memory>
#include <string>

#include "host.h"

namespace ligature::python {

/// Which methods a Python class defines for its forward.
enum class Form { OpSplit, OpClassic, FuserSplit, FuserClassic, None };
Form form_from_string(const std::string& name);

class PythonQuantizer : public Quantizer {
 public:
  explicit PythonQuantizer(py::object quantizer)
      : Quantizer(Format{}), quantizer_(hold(std::move(quantizer))) {}
  std::string format() const override;
  bool is_native() const override { return false; }
  QuantizedPtr quantize(const at::Tensor& x, Usage usage) const override;
  py::object object() const { return py::reinterpret_borrow<py::object>(held(quantizer_)); }

 private:
  HeldPtr quantizer_;
};

/// The calls that basic and fused ones have in common.
class PythonOpCalls {
 public:
  explicit PythonOpCalls(Form form) : form_(form) {}

 protected:
  FuserForwardResult call_compute(const FusibleOperation& op, const Value& input, ArgsList args);
  void call_save_ctx(const FusibleOperation& op, CtxList ctxs, const Value& input,
                     FuserForwardResult& result, ArgsList args);
  FuserForwardResult call_forward(FusibleOperation& op, CtxList ctxs, const Value& input,
                                  ArgsList args);
  FuserBackwardResult call_backward(const FusibleOperation& op, CtxList ctxs,
                                    const Value& grad_output, GradList grad_extra_outputs);

  Form form_;
};

/// Which methods of a basic operation a Python class has changed, so that they have to be called.
struct PythonOpMethods {
  bool pre_forward = false;
  bool input_quantizer = false;
  bool grad_output_quantizer = false;
  bool quantizer_roles = false;
};

/// A basic or fused operation whose passes are calls into Python.
template <class Base>
class PythonOpOf : public Base, public PythonOpCalls {
 public:
  template <class... Args>
  explicit PythonOpOf(PythonOpCalls calls, Args&&... args)
      : Base(std::forward<Args>(args)...), PythonOpCalls(calls) {}

  bool is_python_op() const override { return true; }
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override {
    return call_compute(*this, input, args);
  }
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override {
    call_save_ctx(*this, ctxs, input, result, args);
  }
  FuserForwardResult fuser_forward(CtxList ctxs, const Value& input, ArgsList args) override {
    return call_forward(*this, ctxs, input, args);
  }
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override {
    return call_backward(*this, ctxs, grad_output, grad_extra_outputs);
  }
};

class PythonOperation : public PythonOpOf<BasicOperation> {
 public:
  PythonOperation(std::string name, Form form, PythonOpMethods methods)
      : PythonOpOf(PythonOpCalls(form), std::move(name)), methods_(methods) {}

  size_t num_extra_inputs() const override { return num_extra_inputs_; }
  size_t num_extra_outputs() const override { return num_extra_outputs_; }
  void set_num_extra(size_t inputs, size_t outputs) {
    num_extra_inputs_ = inputs;
    num_extra_outputs_ = outputs;
  }
  void pre_first_fuser_forward() override;
  void pre_fuser_forward(bool requires_grad) override;
  QuantizerPtr get_input_quantizer() override;
  QuantizerPtr get_grad_output_quantizer() override;
  std::vector<QuantizerRole> forward_quantizer_roles() const override;
  std::vector<QuantizerRole> backward_quantizer_roles() const override;

 private:
  QuantizerPtr ask_for_quantizer(const char* method);
  std::vector<QuantizerRole> ask_for_roles(const char* mode) const;

  PythonOpMethods methods_;
  size_t num_extra_inputs_ = 0;
  size_t num_extra_outputs_ = 0;
};

class PythonFusedOperation : public PythonOpOf<FusedOperation> {
 public:
  PythonFusedOperation(std::string name, const OpList& ops, Form form, bool internal_channels)
      : PythonOpOf(PythonOpCalls(form), std::move(name), ops),
        internal_channels_(internal_channels) {}

  bool handles_internal_channels() const override { return internal_channels_; }

 private:
  bool internal_channels_;
};

}  // namespace ligature::python
