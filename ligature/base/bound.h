// What a language binding attaches to objects of the core. The core only passes it on.
#pragma once

#include <memory>

namespace ligature {

/// Base class of a binding's own object. Any thread may destroy it.
class Bound {
 public:
  virtual ~Bound() = default;

 protected:
  Bound() = default;
  Bound(const Bound&) = default;
  Bound& operator=(const Bound&) = default;
};
using BoundPtr = std::shared_ptr<const Bound>;

}  // namespace ligature
