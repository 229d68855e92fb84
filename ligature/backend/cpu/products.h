// Several matrix products in one parallel region, each a set of tasks which all threads share. An
// element's sum is made by one loop in the order of k, so its bits are those of `multiply`.
#pragma once

#include <vector>

#include "ligature/backend/cpu/product_tile.h"

namespace ligature::cpu {

/// a [m, k] and b [n, k], from which `terms` are made. None of the sizes is 0.
struct TileProduct {
  ProductSide a, b;
  ProductTerms terms;
  int64_t m, n, k;
};

void multiply(const std::vector<TileProduct>& products);

}  // namespace ligature::cpu
