// From kernels/pair_stats.h's LogitsPair to what its kernels take. For the .cu files of this folder
// only.

#ifndef LMHEAD_KERNELS_PAIR_LAUNCH_H_
#define LMHEAD_KERNELS_PAIR_LAUNCH_H_

#include "kernels/device/pair.cuh"
#include "kernels/pair_stats.h"

namespace lmhead::kernels {

inline device::PairSide SideOf(ConstMatrixView logits, int64_t cols,
                               const LogitTransform& transform) {
  return {logits.data, static_cast<int32_t>(cols), transform.logit_scale, transform.softcap};
}
inline device::PairSide StudentSide(const LogitsPair& pair) {
  return SideOf(pair.student, pair.tile.cols, pair.student_transform);
}
inline device::PairSide TeacherSide(const LogitsPair& pair) {
  return SideOf(pair.teacher, pair.teacher_cols, pair.teacher_transform);
}

inline bool NeedsTransform(const LogitsPair& pair) {
  return NeedsTransform(pair.student_transform) || NeedsTransform(pair.teacher_transform);
}

inline bool IsValid(const LogitsPair& pair) {
  return pair.student.dtype == pair.teacher.dtype && pair.student.rows == pair.teacher.rows &&
         pair.student.cols == pair.teacher.cols && pair.tile.cols <= pair.student.cols &&
         pair.teacher_cols <= pair.teacher.cols;
}

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_PAIR_LAUNCH_H_
