#include "tests/conformance/twice_dense.h"

#include <gtest/gtest.h>

#include "bench/golden_case.h"
#include "bench/golden_compare.h"
#include "bench/plain_dense.h"

namespace lmhead {
namespace {

bench::Outputs OutputsOf(const GoldenAnswer& answer) {
  bench::Outputs outputs;
  const auto add = [&](const char* name, const auto& values) {
    if (!values.empty()) outputs[name].assign(values.begin(), values.end());
  };
  add("token_loss", answer.chunk.token_loss);
  add("logprob", answer.chunk.logprob);
  add("lse", answer.chunk.lse);
  add("entropy", answer.chunk.entropy);
  add("argmax", answer.chunk.argmax);
  add("grad_hidden_states", answer.chunk.grad_hidden_states);
  add("grad_weight", answer.grad_weight);
  add("grad_bias", answer.grad_bias);
  outputs["loss_sum"] = {answer.chunk.sums.loss_sum};
  outputs["num_valid_tokens"] = {static_cast<double>(answer.chunk.sums.num_valid_tokens)};
  return outputs;
}

}  // namespace

void ExpectWithinTwiceDense(const std::string& golden_path, const GoldenAnswer& answer) {
  const absl::StatusOr<bench::GoldenCase> golden = bench::LoadGoldenCase(golden_path);
  ASSERT_TRUE(golden.ok()) << golden.status();
  const bench::Outputs plain = bench::ComputePlainDense(*golden, bench::Arithmetic::kBFloat16);
  for (const auto& [name, got] : OutputsOf(answer)) {
    ASSERT_TRUE(golden->expected.contains(name)) << name;
    const bench::OutputError error = bench::CompareOutput(name, got, golden->expected.at(name),
                                                          plain.at(name), DType::kBFloat16);
    EXPECT_TRUE(error.Passed()) << name << ": relative " << error.rel << ", limit "
                                << error.rel_limit << "; largest " << error.max_abs << ", limit "
                                << error.max_abs_limit;
  }
}

}  // namespace lmhead
