// The launches of the kernels for rows in groups. No torch here.
#pragma once

#include "ligature/backend/cuda/column_grid.h"
#include "ligature/backend/cuda/grouped_tiles.h"
#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

/// Types of the integers that users give.
enum class IntType : uint8_t { UInt8, Int8, Int16, Int32, Int64 };

// ---- where groups end

/// From sizes on the device.
struct SplitsArgs {
  const void* splits = nullptr;  // [count]
  IntType type = IntType::Int64;
  int32_t count = 0;
  int64_t rows = 0;
  Cut cut;
  int32_t* ends = nullptr;       // [count]
  int32_t* tile_ends = nullptr;  // [count]
};
void launch_group_ends(const SplitsArgs& args, Stream stream);

/// Of some groups, where the host knows them: in the launch itself, so that nothing is copied.
struct KnownEnds {
  static constexpr int kMost = 240;
  int32_t ends[kMost] = {}, tile_ends[kMost] = {};
  int32_t count = 0;
  int32_t* to_ends = nullptr;
  int32_t* to_tile_ends = nullptr;
};
void launch_known_ends(const KnownEnds& args, Stream stream);

// ---- rows on their way into and out of a GEMM

/// y[r] = x[index[r] / divisor], zeros where the index names no row of x and behind the last group
/// (ends null: there are none).
struct GatherArgs {
  int64_t rows = 0, row_bytes = 0, x_rows = 0;
  const void* x = nullptr;
  const int32_t* index = nullptr;
  int32_t divisor = 1;
  GroupEnds groups;
  void* y = nullptr;
};
void launch_gather_rows(const GatherArgs& args, Stream stream);

/// Zeros into the rows behind the last group.
struct TailArgs {
  int64_t rows = 0, row_bytes = 0;
  GroupEnds groups;
  void* out = nullptr;
};
void launch_zero_tail(const TailArgs& args, int sm_count, Stream stream);

/// out[r] = y[r] + scale[r] * bias of r's group, zeros behind the last group.
struct FinishRowsArgs {
  int64_t rows = 0, columns = 0;
  GroupEnds groups;
  const void* y = nullptr;
  const void* bias = nullptr;    // may be null
  int64_t bias_stride = 0;       // from one group's to the next one's
  const float* scale = nullptr;  // may be null
  void* out = nullptr;
  Type type = Type::BFloat16;  // of y and out
  Type bias_type = Type::BFloat16;
};
void launch_finish_rows(const FinishRowsArgs& args, Stream stream);

/// Results of some groups.
struct GroupOuts {
  static constexpr int kMost = 256;
  void* out[kMost] = {};
  int32_t first = 0, count = 0;
};

/// out of group g = dw[g], or added to it; zeros, or left alone, where the group is empty.
struct FinishWeightsArgs {
  int64_t size = 0;  // of one
  GroupEnds groups;
  const void* dw = nullptr;   // [groups, size] in bfloat16
  Type type = Type::Float32;  // of the results
  bool accumulate = false;
};
void launch_finish_weights(const FinishWeightsArgs& args, const GroupOuts& outs, Stream stream);

// ---- sums

/// Row r is row index[r] of x (null: r). The sums over each part's rows, times their scales, then
/// those over each group's parts: without scales in the order of bias_backward of the group's rows.
struct GroupedBiasArgs {
  int64_t rows = 0, columns = 0, x_rows = 0;
  GroupEnds groups;
  const void* x = nullptr;
  const int32_t* index = nullptr;  // may be null
  const float* scale = nullptr;    // may be null
  float* partials = nullptr;       // [most_parts(rows, groups, cut), columns]
  void* db = nullptr;              // [groups, columns]
  Type type = Type::Float32;       // of x and db
};
/// The grid of bias_backward of many rows, and how it cuts the rows of a group.
ColumnGrid grouped_bias_grid(const GroupedBiasArgs& args, int sm_count);
Cut grouped_bias_cut(const ColumnGrid& grid);
void launch_grouped_bias_partials(const GroupedBiasArgs& args, const ColumnGrid& grid,
                                  Stream stream);
void launch_grouped_bias_sums(const GroupedBiasArgs& args, Stream stream);

/// out[r] = x[r] . bias of r's group, 0 behind the last group.
struct GroupedScaleArgs {
  int64_t rows = 0, columns = 0, x_rows = 0;
  GroupEnds groups;
  const void* x = nullptr;
  const int32_t* index = nullptr;  // may be null
  const void* bias = nullptr;
  int64_t bias_stride = 0;
  float* out = nullptr;
  Type type = Type::Float32, bias_type = Type::Float32;
};
void launch_grouped_scale_grad(const GroupedScaleArgs& args, Stream stream);

// ---- GEMMs of our own in bfloat16 on Hopper (wgmma_grouped.cuh)

/// out[r] = x[r] w_g^T (+ scale[r] * bias_g), or x[r] w_g. Contiguous rows.
struct GroupedRowsArgs {
  int64_t rows = 0, columns = 0, k = 0;  // of the result
  GroupEnds groups;
  const void* x = nullptr;
  const void* w = nullptr;     // [columns, k] or [k, columns] of each group
  int64_t w_stride = 0;        // elements from one group's to the next one's
  const void* bias = nullptr;  // bfloat16 [groups, columns]; may be null
  int64_t bias_stride = 0;
  const float* scale = nullptr;  // may be null
  void* out = nullptr;
};
bool grouped_rows_fit(const GroupedRowsArgs& args);
// False where the driver refuses.
bool launch_grouped_rows(const GroupedRowsArgs& args, int sm_count, Stream stream);
bool launch_grouped_rows_across(const GroupedRowsArgs& args, int sm_count, Stream stream);

/// out_g [m, n] = the sum over the group's rows r of dy[r]^T x[r], or added to it.
struct GroupedWeightsArgs {
  int64_t rows = 0, m = 0, n = 0;
  GroupEnds groups;
  const void* dy = nullptr;
  const void* x = nullptr;
  Type type = Type::Float32;  // of the results: float or bfloat16
  bool accumulate = false;
};
bool grouped_weights_fit(const GroupedWeightsArgs& args);
bool launch_grouped_weights(const GroupedWeightsArgs& args, const GroupOuts& outs, int sm_count,
                            Stream stream);

}  // namespace ligature::cuda
