// A product is cut in one of three ways, by what most of its memory is, so that this is gone
// through in its order. Where k is short, as in a weight's gradient of few rows, the result: a task
// writes whole pieces of its rows, with b packed for all of them before. Where rows are few, b: it
// is packed in parts that stay in the nearest cache. Otherwise a task is 32 columns of a block of
// rows, as in product.cpp. Operands are packed by each thread for itself, once for all tasks that
// follow each other.
#include "ligature/backend/cpu/products.h"

#include <algorithm>

#include "ligature/backend/cpu/product_scratch.h"
#include "ligature/backend/cpu/shared_tasks.h"
#include "ligature/backend/cpu/stream.h"

namespace ligature::cpu {
namespace {

constexpr int64_t kShortUnits = 128;      // of k
constexpr int64_t kShortPanels = 8;       // of rows in a task, with which packing b is repaid
constexpr int64_t kRightUnits = 1 << 16;  // of b, packed for a short k: 256 KiB
constexpr int64_t kLeftUnits = 1 << 18;   // of a, packed otherwise: 1 MiB
constexpr int64_t kLeastPanels = 8;
constexpr int64_t kFewWidth = 512;        // columns of a task of few rows
constexpr int64_t kPartUnits = 32;        // of k that few rows are multiplied with at a time
constexpr int64_t kMultiplies = 1 << 18;  // what repays handing a task to another thread
constexpr int64_t kTasksPerThread = 8;

enum class Way : uint8_t { short_k, few_rows, tall };

/// How a product is cut into tasks: blocks of rows, and columns of each.
struct Cut {
  Cut(const TileProduct& p, int64_t most_panels, int64_t few_width)
      : panels(p.m, kTileRows), units(p.a.units(p.k)) {
    if (panels.count == 1) {
      way = Way::few_rows;
      width = std::min(few_width, (p.n + kTileColumns - 1) / kTileColumns * kTileColumns);
    } else if (units <= kShortUnits) {
      way = Way::short_k;
      width = std::min(p.n, kRightUnits / units / kTileColumns * kTileColumns);
      blocks = Parts(panels.count, std::max(kShortPanels, most_panels)).count;
    } else {
      const int64_t fitting = kLeftUnits / (padded(units) * kTileRows);
      blocks = Parts(panels.count, std::max(kLeastPanels, std::min(fitting, most_panels))).count;
    }
    columns = (p.n + width - 1) / width;
  }

  int64_t tasks() const { return blocks * columns; }

  Parts panels;
  int64_t units;
  Way way = Way::tall;
  int64_t width = kTileColumns, columns = 1, blocks = 1;
};

bool begins_lines(const ProductMatrix& m) {
  const int64_t lines = 64 / (m.bfloat16 ? 2 : 4);
  return reinterpret_cast<uintptr_t>(m.data) % 64 == 0 && m.stride % lines == 0;
}

/// What a thread has packed, for the tasks that follow.
class Packed {
 public:
  explicit Packed(bool streams) : streams_(streams) {}

  void run(const TileProduct& p, const Cut& cut, int64_t product, int64_t task) {
    // Neighbours in a list of tasks share what is more expensive to pack.
    const bool is_short = cut.way == Way::short_k;
    const int64_t block = is_short ? task % cut.blocks : task / cut.columns;
    const int64_t column = (is_short ? task / cut.blocks : task % cut.columns) * cut.width;
    const int64_t begin = block * cut.panels.count / cut.blocks;
    const int64_t end = (block + 1) * cut.panels.count / cut.blocks;
    const int64_t width = std::min(cut.width, p.n - column);
    if (is_short) {
      run_short(p, cut, product, begin, end, column, width);
    } else if (cut.way == Way::few_rows) {
      run_few(p, cut, product, column, width);
    } else {
      run_tall(p, cut, product, begin, end, column, width);
    }
  }

 private:
  void run_short(const TileProduct& p, const Cut& cut, int64_t product, int64_t begin, int64_t end,
                 int64_t column, int64_t width) {
    static thread_local Scratch left_scratch, right_scratch;
    uint32_t* const left = left_scratch.get(kTileRows * padded(kShortUnits));
    uint32_t* const right = right_scratch.get(kRightUnits);
    if (!is_packed(product, column)) {
      for (int64_t c = 0; c < width; c += kTileColumns) {
        pack_right(p.b, column + c, std::min(kTileColumns, width - c), p.k, right + c * cut.units);
      }
    }
    ProductTerms terms = p.terms;
    terms.streams = streams_ && terms.add.data == nullptr && begins_lines(terms.out);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = cut.panels.begin(i), rows = cut.panels.size(i);
      pack_left(p.a, row, Parts(rows, kTileRows), 0, 1, p.k, left);
      for (int64_t c = 0; c < width; c += kTileColumns) {
        multiply_tile(left, right + c * cut.units, rows, std::min(kTileColumns, width - c),
                      cut.units, p.a.bfloat16, terms, row, column + c);
      }
    }
  }

  void run_tall(const TileProduct& p, const Cut& cut, int64_t product, int64_t begin, int64_t end,
                int64_t column, int64_t width) {
    static thread_local Scratch left_scratch, right_scratch;
    const int64_t row_units = padded(cut.units);
    const int64_t first = cut.panels.begin(begin);
    const int64_t rows = cut.panels.begin(end) - first;
    uint32_t* const left = left_scratch.get(rows * row_units);
    uint32_t* const right = right_scratch.get(cut.units * kTileColumns);
    const Parts panels(rows, (rows + end - begin - 1) / (end - begin));
    if (!is_packed(product, begin)) pack_left(p.a, first, panels, 0, panels.count, p.k, left);
    pack_right(p.b, column, width, p.k, right);
    for (int64_t i = 0; i < panels.count; ++i) {
      multiply_tile(left + panels.begin(i) * row_units, right, panels.size(i), width, cut.units,
                    p.a.bfloat16, p.terms, first + panels.begin(i), column);
    }
  }

  void run_few(const TileProduct& p, const Cut& cut, int64_t product, int64_t column,
               int64_t width) {
    static thread_local Scratch left_scratch;
    uint32_t* const left = left_scratch.get(p.m * padded(cut.units));
    if (!is_packed(product, 0)) pack_left(p.a, 0, cut.panels, 0, 1, p.k, left);
    alignas(64) uint32_t right[kPartUnits * kTileColumns];
    alignas(64) float data[kTileRows * kFewWidth];
    const bool along_k = p.b.follows_k();
    const int64_t parts = (cut.units + kPartUnits - 1) / kPartUnits;
    const int64_t tiles = (width + kTileColumns - 1) / kTileColumns;
    for (int64_t i = 0; i < parts * tiles; ++i) {
      const int64_t tile = along_k ? i / parts : i % tiles;
      const int64_t part = along_k ? i % parts : i / tiles;
      const int64_t c = tile * kTileColumns, unit = part * kPartUnits;
      const int64_t columns = std::min(kTileColumns, width - c);
      const int64_t units = std::min(kPartUnits, cut.units - unit);
      pack_right_part(p.b, column + c, columns, p.k, unit, units, right);
      const TileSums sums{data + c, kFewWidth};
      sum_tile(left + unit * p.m, right, p.m, columns, units, p.a.bfloat16, sums, part > 0);
      if (part + 1 == parts) write_tile(sums, p.m, columns, p.terms, 0, column + c);
    }
  }

  bool is_packed(int64_t product, int64_t part) {
    const bool is = product == product_ && part == part_;
    product_ = product;
    part_ = part;
    return is;
  }

  bool streams_;
  int64_t product_ = -1, part_ = -1;
};

}  // namespace

void multiply(const std::vector<TileProduct>& products) {
  if (products.empty()) return;
  int64_t panels = 0, multiplies = 0, bytes = 0;
  for (const TileProduct& p : products) {
    panels += (p.m + kTileRows - 1) / kTileRows;
    multiplies += p.m * p.n * p.k;
    bytes += p.m * p.n * (p.terms.out.bfloat16 ? 2 : 4);
  }
  const int64_t wanted = kTasksPerThread * at::get_num_threads();
  const int64_t columns = (products[0].n + kTileColumns - 1) / kTileColumns;
  const int64_t most_panels = std::max<int64_t>(1, panels * columns / wanted);
  const int64_t few_width = std::clamp<int64_t>(most_panels * kTileColumns, 64, kFewWidth);
  std::vector<Cut> cuts;
  std::vector<int64_t> ends;
  cuts.reserve(products.size());
  ends.reserve(products.size());
  int64_t count = 0;
  for (const TileProduct& p : products) {
    cuts.emplace_back(p, most_panels, few_width);
    ends.push_back(count += cuts.back().tasks());
  }
  SharedTasks tasks(count, kMultiplies / std::max<int64_t>(1, multiplies / count));
  tasks.run([&](const auto& next) {
    Packed packed(bytes >= kStreamResultBytes);
    for (int64_t i = next(); i >= 0; i = next()) {
      const int64_t g = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
      packed.run(products[g], cuts[g], g, i - (g > 0 ? ends[g - 1] : 0));
    }
    stream_end();
  });
}

}  // namespace ligature::cpu
