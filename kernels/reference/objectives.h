// Divergences and policy objectives of one row, by their definitions, on full vectors: in double
// for the oracle, in float for the yardstick.
//
// Logits of -inf are masked: probability 0, and 0 times an infinity is 0. Everything is worked out
// from log-probabilities, as a trainer does after log_softmax. docs/NUMERICS.md has the sources.

#ifndef LMHEAD_KERNELS_REFERENCE_OBJECTIVES_H_
#define LMHEAD_KERNELS_REFERENCE_OBJECTIVES_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kernels/reference/reference.h"

namespace lmhead::reference {

// weight * value, where a weight of 0 leaves even an infinite value out.
template <typename Real>
Real Weighted(Real weight, Real value) {
  return weight == Real{0} ? Real{0} : weight * value;
}

// In 16 running sums, as a vectorised reduction has them.
template <typename Real>
Real SumOf(const std::vector<Real>& values) {
  Real lanes[16] = {};
  for (size_t i = 0; i < values.size(); ++i) lanes[i % 16] += values[i];
  Real sum = 0;
  for (const Real lane : lanes) sum += lane;
  return sum;
}

template <typename Real>
struct LogSoftmax {
  explicit LogSoftmax(const std::vector<Real>& logits);

  Real LogProb(int64_t j) const {
    return all_masked ? -std::numeric_limits<Real>::infinity() : log_probs[j];
  }
  Real Prob(int64_t j) const { return std::exp(LogProb(j)); }

  bool all_masked = true;
  int64_t argmax = 0;  // The lowest index among equals.
  Real logits_max = -std::numeric_limits<Real>::infinity();
  Real log_sum = 0;
  Real lse = -std::numeric_limits<Real>::infinity();
  Real entropy = 0;
  std::vector<Real> log_probs;  // <= 0
};

template <typename Real>
LogSoftmax<Real>::LogSoftmax(const std::vector<Real>& logits) : log_probs(logits) {
  if (logits.empty()) return;
  argmax = std::max_element(logits.begin(), logits.end()) - logits.begin();
  logits_max = logits[argmax];
  all_masked = logits_max == -std::numeric_limits<Real>::infinity();
  if (all_masked) return;
  std::vector<Real> terms(logits.size());
  for (size_t j = 0; j < logits.size(); ++j) terms[j] = std::exp(logits[j] - logits_max);
  log_sum = std::log(SumOf(terms));
  lse = logits_max + log_sum;
  for (size_t j = 0; j < logits.size(); ++j) {
    log_probs[j] = std::min(Real{0}, logits[j] - logits_max - log_sum);
    terms[j] = Weighted(std::exp(log_probs[j]), logits[j] - logits_max);
  }
  // Relative to the maximum, so that a common offset of the logits does not make it coarse.
  entropy = log_sum - SumOf(terms);
}

// A divergence and its derivative with respect to the student's u = z2 / kl_temperature, before
// any weight.
template <typename Real>
struct DivergenceTerm {
  Real value = 0;
  std::vector<Real> grad_logits;  // [vocab_size of the student]; 0 where it is masked.
  Real dropped_teacher_mass = 0;
};

// Of full distributions: softmax(student) is p, softmax(teacher) is q. When either has no unmasked
// logit the value is infinite and there is no gradient; likewise for an infinite reverse KL.
template <typename Real>
DivergenceTerm<Real> DivergenceOf(const Distillation& spec, std::vector<Real> student,
                                  std::vector<Real> teacher);

// Against the teacher's k log-probabilities, already at kl_temperature.
template <typename Real>
DivergenceTerm<Real> TopkDivergenceOf(const Distillation& spec, const std::vector<Real>& student,
                                      std::span<const int32_t> ids,
                                      const std::vector<Real>& logprobs);

// A policy objective and its derivatives with respect to the target's log-probability and the
// entropy.
template <typename Real>
struct PolicyTerm {
  Real value = 0;
  Real logprob_grad = 0;
  Real entropy_grad = 0;
  bool clipped = false;    // The ratio's branch has no gradient because of a clip.
  Real old_policy_kl = 0;  // r - 1 - log r
};

template <typename Real>
PolicyTerm<Real> ClippedPolicyOf(const Policy& spec, Real logprob, Real entropy, Real old_logprob,
                                 Real advantage, Real reference_logprob);

// --- Definitions -------------------------------------------------------------------------------

namespace internal {

// Both sides over the ids that the divergence is taken over. Returns the teacher's mass that is
// left out.
template <typename Real>
Real AlignVocabularies(TeacherVocabulary vocabulary, std::vector<Real>* student,
                       std::vector<Real>* teacher) {
  constexpr Real kMasked = -std::numeric_limits<Real>::infinity();
  if (vocabulary == TeacherVocabulary::kPad) {
    const size_t size = std::max(student->size(), teacher->size());
    student->resize(size, kMasked);
    teacher->resize(size, kMasked);
    return 0;
  }
  const size_t size = std::min(student->size(), teacher->size());
  const LogSoftmax<Real> full(*teacher);
  Real dropped = 0;
  for (size_t j = size; j < teacher->size(); ++j) dropped += full.Prob(j);
  student->resize(size);
  teacher->resize(size);
  return dropped;
}

template <typename Real>
void ForwardKl(const LogSoftmax<Real>& p, const LogSoftmax<Real>& q, DivergenceTerm<Real>* term) {
  std::vector<Real> terms(p.log_probs.size());
  for (size_t j = 0; j < terms.size(); ++j) {
    terms[j] = Weighted(q.Prob(j), q.LogProb(j) - p.LogProb(j));
    term->grad_logits[j] = p.Prob(j) - q.Prob(j);
  }
  term->value = SumOf(terms);
}

template <typename Real>
void ReverseKl(const LogSoftmax<Real>& p, const LogSoftmax<Real>& q, DivergenceTerm<Real>* term) {
  std::vector<Real> terms(p.log_probs.size());
  for (size_t j = 0; j < terms.size(); ++j) {
    terms[j] = Weighted(p.Prob(j), p.LogProb(j) - q.LogProb(j));
  }
  term->value = SumOf(terms);
  if (!std::isfinite(term->value)) return;
  for (size_t j = 0; j < terms.size(); ++j) {
    term->grad_logits[j] = Weighted(p.Prob(j), p.LogProb(j) - q.LogProb(j) - term->value);
  }
}

template <typename Real>
Real LogAddExp(Real a, Real b) {
  const Real larger = std::max(a, b);
  if (larger == -std::numeric_limits<Real>::infinity()) return larger;
  return larger + std::log1p(std::exp(std::min(a, b) - larger));
}

template <typename Real>
void Jsd(Real beta, const LogSoftmax<Real>& p, const LogSoftmax<Real>& q,
         DivergenceTerm<Real>* term) {
  const size_t size = p.log_probs.size();
  std::vector<Real> log_m(size), terms_p(size), terms_q(size);
  for (size_t j = 0; j < size; ++j) {
    log_m[j] = LogAddExp(std::log(beta) + q.LogProb(j), std::log1p(-beta) + p.LogProb(j));
    terms_p[j] = Weighted(p.Prob(j), p.LogProb(j) - log_m[j]);
    terms_q[j] = Weighted(q.Prob(j), q.LogProb(j) - log_m[j]);
  }
  const Real kl_p = SumOf(terms_p);
  term->value = beta * SumOf(terms_q) + (1 - beta) * kl_p;
  for (size_t j = 0; j < size; ++j) {
    term->grad_logits[j] = (1 - beta) * Weighted(p.Prob(j), p.LogProb(j) - log_m[j] - kl_p);
  }
}

}  // namespace internal

template <typename Real>
DivergenceTerm<Real> DivergenceOf(const Distillation& spec, std::vector<Real> student,
                                  std::vector<Real> teacher) {
  const size_t vocab_size = student.size();
  DivergenceTerm<Real> term;
  term.dropped_teacher_mass = internal::AlignVocabularies(spec.vocabulary, &student, &teacher);
  term.grad_logits.resize(student.size());
  const LogSoftmax<Real> p(student);
  const LogSoftmax<Real> q(teacher);
  if (p.all_masked || q.all_masked) {
    term.value = std::numeric_limits<Real>::infinity();
  } else if (spec.divergence == Divergence::kReverseKl || spec.jsd_beta == 1.0) {
    internal::ReverseKl(p, q, &term);
  } else if (spec.divergence == Divergence::kForwardKl || spec.jsd_beta == 0.0) {
    internal::ForwardKl(p, q, &term);
  } else {
    internal::Jsd(static_cast<Real>(spec.jsd_beta), p, q, &term);
  }
  for (size_t j = 0; j < student.size(); ++j) {
    if (student[j] == -std::numeric_limits<Real>::infinity()) term.grad_logits[j] = 0;
  }
  term.grad_logits.resize(vocab_size);
  return term;
}

template <typename Real>
DivergenceTerm<Real> TopkDivergenceOf(const Distillation& spec, const std::vector<Real>& student,
                                      std::span<const int32_t> ids,
                                      const std::vector<Real>& logprobs) {
  constexpr Real kMasked = -std::numeric_limits<Real>::infinity();
  const LogSoftmax<Real> p(student);
  std::vector<Real> outside_logits = student;
  std::vector<Real> masses(ids.size());
  for (size_t k = 0; k < ids.size(); ++k) {
    masses[k] = std::exp(logprobs[k]);
    outside_logits[ids[k]] = kMasked;
  }
  const LogSoftmax<Real> outside(outside_logits);
  const Real mass = SumOf(masses);
  DivergenceTerm<Real> term;
  term.dropped_teacher_mass = std::max(Real{0}, 1 - mass);
  term.grad_logits.resize(student.size());
  if (p.all_masked) {
    term.value = std::numeric_limits<Real>::infinity();
    return term;
  }
  const bool renormalise = spec.topk_mass == TopkMass::kRenormalise;
  // There is no bucket outside of the whole vocabulary: all mass that there is, is kept.
  const bool has_bucket = spec.topk_mass == TopkMass::kTail && ids.size() < student.size();
  const Real kept = renormalise || has_bucket ? Real{1} : mass;
  const Real bucket = has_bucket ? term.dropped_teacher_mass : Real{0};
  for (size_t j = 0; j < student.size(); ++j) {
    term.grad_logits[j] = kept * p.Prob(j) - Weighted(bucket, outside.Prob(j));
  }
  std::vector<Real> terms(ids.size());
  for (size_t k = 0; k < ids.size(); ++k) {
    const Real q = renormalise ? masses[k] / mass : masses[k];
    const Real log_q = renormalise ? logprobs[k] - std::log(mass) : logprobs[k];
    terms[k] = Weighted(q, log_q - p.LogProb(ids[k]));
    if (p.LogProb(ids[k]) != kMasked) term.grad_logits[ids[k]] -= q;
  }
  const Real log_outside = outside.all_masked ? kMasked : outside.lse - p.lse;
  term.value = SumOf(terms) + Weighted(bucket, std::log(bucket) - log_outside);
  return term;
}

template <typename Real>
PolicyTerm<Real> ClippedPolicyOf(const Policy& spec, Real logprob, Real entropy, Real old_logprob,
                                 Real advantage, Real reference_logprob) {
  PolicyTerm<Real> term;
  const Real log_ratio = logprob - old_logprob;
  const Real ratio = std::exp(log_ratio);
  const Real surrogate = Weighted(advantage, ratio);
  const Real clamped = std::clamp(ratio, static_cast<Real>(1 - spec.clip_low),
                                  static_cast<Real>(1 + spec.clip_high)) *
                       advantage;
  Real loss = -std::min(surrogate, clamped);
  term.clipped = surrogate > clamped;
  if (spec.dual_clip > 1.0 && advantage < 0) {
    const Real most = -static_cast<Real>(spec.dual_clip) * advantage;
    term.clipped = term.clipped || loss > most;
    loss = std::min(loss, most);
  }
  term.logprob_grad = term.clipped ? Real{0} : -surrogate;
  term.old_policy_kl = std::expm1(log_ratio) - log_ratio;
  if (spec.entropy_coefficient != 0.0) {
    term.entropy_grad = -static_cast<Real>(spec.entropy_coefficient);
    loss += term.entropy_grad * entropy;
  }
  if (spec.reference_kl_coefficient != 0.0) {
    const auto coefficient = static_cast<Real>(spec.reference_kl_coefficient);
    const Real distance = reference_logprob - logprob;
    const bool masked = std::isinf(distance);  // A masked target: nothing brings it back.
    loss += coefficient * (masked ? distance : std::expm1(distance) - distance);
    if (!masked) term.logprob_grad += coefficient * -std::expm1(distance);
  }
  term.value = loss;
  return term;
}

}  // namespace lmhead::reference

#endif  // LMHEAD_KERNELS_REFERENCE_OBJECTIVES_H_
