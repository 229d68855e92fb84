// Autograd nodes are held by intrusive pointers since torch 2.12, by shared pointers before.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace ligature {

using NodePtr = decltype(torch::autograd::Edge::function);
constexpr bool kSharedNodes = std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>;

template <class T, bool shared = kSharedNodes>
struct NodeMaker {
  template <class... Args>
  static auto make(Args&&... args) {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
};

template <class T>
struct NodeMaker<T, true> {
  template <class... Args>
  static auto make(Args&&... args) {
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...),
                              [](T* node) { deleteNode(node); });
  }
};

template <class T, class... Args>
auto make_node(Args&&... args) {
  return NodeMaker<T>::make(std::forward<Args>(args)...);
}

}  // namespace ligature
