#include "client/cpp/step_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "absl/synchronization/notification.h"
#include "client/cpp/client.h"
#include "proto/types/limits.h"
#include "tests/client/fake_service.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kHiddenSize = 8;
constexpr int64_t kRowBytes = kHiddenSize * 2;  // bfloat16.

// Rows of a caller and the places for their results, in memory of their own.
struct Rows {
  explicit Rows(int64_t num_tokens, int seed = 0)
      : hidden(static_cast<size_t>(num_tokens * kHiddenSize)),
        targets(static_cast<size_t>(num_tokens)),
        grad(hidden.size()),
        token_loss(targets.size()),
        argmax(targets.size()) {
    for (size_t i = 0; i < hidden.size(); ++i) {
      hidden[i] = static_cast<uint16_t>(i * 31 + static_cast<size_t>(seed));
    }
    std::iota(targets.begin(), targets.end(), seed);
  }

  LossRows View() {
    const auto num_tokens = static_cast<int64_t>(targets.size());
    return {.hidden_states = {hidden.data(), num_tokens, kHiddenSize, DType::kBFloat16},
            .targets = targets,
            .grad_hidden_states = {grad.data(), num_tokens, kHiddenSize, DType::kBFloat16},
            .token_loss = token_loss.data(),
            .argmax = argmax.data()};
  }

  double LossSum() const {
    double sum = 0.0;
    for (const int32_t target : targets) sum += FakeTokenLoss(target);
    return sum;
  }

  void ExpectAnswered() const {
    const auto* hidden_bytes = reinterpret_cast<const char*>(hidden.data());
    const auto* grad_bytes = reinterpret_cast<const char*>(grad.data());
    int64_t wrong_bytes = 0;
    for (size_t i = 0; i < hidden.size() * 2; ++i) {
      wrong_bytes += grad_bytes[i] == FakeGradByte(hidden_bytes[i]) ? 0 : 1;
    }
    EXPECT_EQ(wrong_bytes, 0);
    for (size_t i = 0; i < targets.size(); ++i) {
      ASSERT_EQ(token_loss[i], FakeTokenLoss(targets[i])) << "row " << i;
      ASSERT_EQ(argmax[i], FakeArgmax(targets[i])) << "row " << i;
    }
  }

  std::vector<uint16_t> hidden;
  std::vector<int32_t> targets;
  std::vector<uint16_t> grad;
  std::vector<float> token_loss;
  std::vector<int32_t> argmax;
};

class StepWriterTest : public testing::Test {
 protected:
  WriterSpec Spec(int64_t rows_per_chunk = 4) const {
    WriterSpec spec{.head = "lm",
                    .step = 1,
                    .worker = "w0",
                    .incarnation = service_.incarnation,
                    .hidden_dtype = DType::kBFloat16,
                    .chunk_bytes = rows_per_chunk * kRowBytes + kRowBytes / 2};
    spec.outputs.set_grad_hidden_states(true);
    spec.outputs.set_token_loss(true);
    spec.outputs.set_argmax(true);
    return spec;
  }

  std::unique_ptr<StepWriter> Open(const WriterSpec& spec) {
    auto client = Client::Connect(server_.address(), options_);
    EXPECT_TRUE(client.ok()) << client.status();
    if (!client.ok()) return nullptr;
    auto writer = (*client)->OpenWriter(spec);
    EXPECT_TRUE(writer.ok()) << writer.status();
    return writer.ok() ? std::move(*writer) : nullptr;
  }

  // The error of computing some rows with a writer on this service.
  absl::Status ErrorOfCompute(const WriterSpec& spec) {
    auto client = Client::Connect(server_.address(), options_);
    if (!client.ok()) return client.status();
    auto writer = (*client)->OpenWriter(spec);
    if (!writer.ok()) return writer.status();
    Rows rows(10);
    const auto result = (*writer)->Compute(rows.View());
    if (!result.ok()) return result.status();
    return (*writer)->Finish().status();
  }

  FakeService service_;
  FakeServer server_{&service_};
  ClientOptions options_{.connect_timeout = absl::Seconds(20), .max_attempts = 3};
};

TEST_F(StepWriterTest, CutsRowsAndGathersResults) {
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  Rows rows(10);
  const auto result = writer->Compute(rows.View());
  ASSERT_TRUE(result.ok()) << result.status();
  rows.ExpectAnswered();
  EXPECT_EQ(result->sums.loss_sum, rows.LossSum());
  EXPECT_EQ(result->sums.num_tokens, 10);
  EXPECT_EQ(result->num_chunks, 3);
  EXPECT_EQ(result->num_duplicates, 0);
  EXPECT_EQ(result->timings.compute_seconds, 3.0);
  EXPECT_THAT(service_.chunk_rows(), ElementsAre(4, 4, 2));

  Rows more(5, 100);
  ASSERT_TRUE(writer->Compute(more.View()).ok());
  more.ExpectAnswered();
  const auto finished = writer->Finish();
  ASSERT_TRUE(finished.ok()) << finished.status();
  EXPECT_EQ(*finished, 5u);
  EXPECT_THAT(service_.ledger()["w0"], ElementsAre(0, 1, 2, 3, 4));
}

TEST_F(StepWriterTest, TellsTheServerWhatItWasToldToOpen) {
  WriterSpec spec = Spec();
  spec.num_connections = 2;
  spec.recipe.set_ignore_index(-1);
  const auto writer = Open(spec);
  ASSERT_NE(writer, nullptr);
  const std::vector<v1::StreamOpen> opens = service_.opens();
  ASSERT_THAT(opens, SizeIs(2));
  EXPECT_NE(opens[0].stream_index(), opens[1].stream_index());
  for (const v1::StreamOpen& open : opens) {
    EXPECT_EQ(open.head(), "lm");
    EXPECT_EQ(open.step(), 1u);
    EXPECT_EQ(open.worker(), "w0");
    EXPECT_EQ(open.incarnation(), service_.incarnation);
    EXPECT_EQ(open.hidden_dtype(), v1::DTYPE_BFLOAT16);
    EXPECT_EQ(open.recipe().ignore_index(), -1);
    EXPECT_TRUE(open.outputs().grad_hidden_states());
  }
}

TEST_F(StepWriterTest, CarriesEveryPerTokenFieldAndOutput) {
  service_.check_chunk = [](const v1::Chunk& chunk) {
    const bool good = chunk.token_weights_size() == 2 && chunk.token_weights(1) == 0.5f &&
                      chunk.token_temperature_size() == 2 && chunk.token_temperature(0) == 2.0f &&
                      chunk.grad_scale() == 0.25f && chunk.has_checksum();
    return good ? grpc::Status::OK
                : grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, chunk.ShortDebugString());
  };
  WriterSpec spec = Spec();
  spec.recipe.set_token_weights(true);
  spec.recipe.set_per_token_temperature(true);
  spec.outputs.set_logprob(true);
  spec.outputs.set_lse(true);
  spec.outputs.set_entropy(true);
  const auto writer = Open(spec);
  ASSERT_NE(writer, nullptr);
  Rows rows(2, 5);
  const std::vector<float> weights = {1.0f, 0.5f};
  const std::vector<float> temperatures = {2.0f, 3.0f};
  std::vector<float> logprob(2), lse(2), entropy(2);
  LossRows view = rows.View();
  view.token_weights = weights;
  view.token_temperature = temperatures;
  view.grad_scale = 0.25f;
  view.logprob = logprob.data();
  view.lse = lse.data();
  view.entropy = entropy.data();
  const auto result = writer->Compute(view);
  ASSERT_TRUE(result.ok()) << result.status();
  rows.ExpectAnswered();
  EXPECT_THAT(logprob, ElementsAre(FakeLogprob(5), FakeLogprob(6)));
  EXPECT_THAT(lse, ElementsAre(FakeLse(5), FakeLse(6)));
  EXPECT_THAT(entropy, ElementsAre(FakeEntropy(5), FakeEntropy(6)));
}

TEST_F(StepWriterTest, SendsNoChecksumWhenToldNotTo) {
  service_.check_chunk = [](const v1::Chunk& chunk) {
    return chunk.has_checksum() || chunk.has_grad_scale()
               ? grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, chunk.ShortDebugString())
               : grpc::Status::OK;
  };
  WriterSpec spec = Spec();
  spec.send_checksums = false;
  const absl::Status status = ErrorOfCompute(spec);
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(StepWriterTest, ObeysTheServersRowsPerChunk) {
  service_.max_chunk_tokens = 3;
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  Rows rows(7);
  ASSERT_TRUE(writer->Compute(rows.View()).ok());
  EXPECT_THAT(service_.chunk_rows(), ElementsAre(3, 3, 1));
}

TEST_F(StepWriterTest, SendsAtLeastOneRowAMessage) {
  WriterSpec spec = Spec();
  spec.chunk_bytes = 1;
  const auto writer = Open(spec);
  ASSERT_NE(writer, nullptr);
  Rows rows(2);
  ASSERT_TRUE(writer->Compute(rows.View()).ok());
  EXPECT_THAT(service_.chunk_rows(), ElementsAre(1, 1));
}

TEST_F(StepWriterTest, FillsTheWindowOfEveryConnectionAndNoMore) {
  service_.hold_until = 6;  // No result comes before all windows are full.
  WriterSpec spec = Spec(1);
  spec.num_connections = 3;
  spec.max_inflight_chunks = 2;
  const auto writer = Open(spec);
  ASSERT_NE(writer, nullptr);
  Rows rows(6);
  ASSERT_TRUE(writer->Compute(rows.View()).ok());
  rows.ExpectAnswered();
  for (const auto& [stream, chunks] : service_.chunks_by_stream()) EXPECT_EQ(chunks, 2) << stream;

  Rows many(200, 1);
  ASSERT_TRUE(writer->Compute(many.View()).ok());
  many.ExpectAnswered();
  EXPECT_LE(service_.most_unanswered(), 2);
}

TEST_F(StepWriterTest, TheServersWindowWinsWhenItIsLower) {
  service_.max_inflight_chunks = 1;
  const auto writer = Open(Spec(1));
  ASSERT_NE(writer, nullptr);
  Rows rows(50);
  ASSERT_TRUE(writer->Compute(rows.View()).ok());
  EXPECT_EQ(service_.most_unanswered(), 1);
}

TEST_F(StepWriterTest, TicketsMayBeWaitedForInAnyOrderAndAfterFinish) {
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  Rows first(9, 1), second(9, 2);
  const auto first_ticket = writer->Submit(first.View());
  const auto second_ticket = writer->Submit(second.View());
  ASSERT_TRUE(first_ticket.ok() && second_ticket.ok());
  ASSERT_TRUE(writer->Wait(*second_ticket).ok());
  ASSERT_TRUE(writer->Finish().ok());
  const auto result = writer->Wait(*first_ticket);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->sums.loss_sum, first.LossSum());
  first.ExpectAnswered();
  second.ExpectAnswered();
  EXPECT_TRUE(absl::IsInvalidArgument(writer->Wait(*first_ticket).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(writer->Wait(99).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(writer->Submit(first.View()).status()));
}

TEST_F(StepWriterTest, ManyThreadsShareAWriter) {
  WriterSpec spec = Spec();
  spec.num_connections = 2;
  const auto writer = Open(spec);
  ASSERT_NE(writer, nullptr);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&writer, t] {
      for (int i = 0; i < 20; ++i) {
        Rows rows(13, 1000 * t + i);
        const auto result = writer->Compute(rows.View());
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_EQ(result->sums.loss_sum, rows.LossSum());
        rows.ExpectAnswered();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto finished = writer->Finish();
  ASSERT_TRUE(finished.ok()) << finished.status();
  EXPECT_EQ(*finished, 4u * 20u * 4u);
  EXPECT_THAT(service_.ledger()["w0"], SizeIs(4 * 20 * 4));
}

TEST_F(StepWriterTest, FinishWithoutAnyChunk) {
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  const auto finished = writer->Finish();
  ASSERT_TRUE(finished.ok()) << finished.status();
  EXPECT_EQ(*finished, 0u);
}

TEST_F(StepWriterTest, EvaluatesWithoutAStep) {
  WriterSpec spec = Spec();
  spec.step = 0;
  spec.worker = "";
  spec.incarnation = 0;
  EXPECT_TRUE(ErrorOfCompute(spec).ok());
}

// --- Breaks -------------------------------------------------------------------------------------

TEST_F(StepWriterTest, SendsAgainWhatABrokenStreamDidNotAnswer) {
  std::atomic<int> num_chunks{0};
  service_.check_chunk = [&num_chunks](const v1::Chunk&) {
    const int n = ++num_chunks;
    return n == 5 || n == 9 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut") : grpc::Status::OK;
  };
  WriterSpec spec = Spec(1);
  spec.num_connections = 2;
  const auto writer = Open(spec);
  ASSERT_NE(writer, nullptr);
  Rows rows(40);
  const auto result = writer->Compute(rows.View());
  ASSERT_TRUE(result.ok()) << result.status();
  rows.ExpectAnswered();
  EXPECT_EQ(result->sums.loss_sum, rows.LossSum());
  EXPECT_EQ(result->num_chunks, 40);
  const auto finished = writer->Finish();
  ASSERT_TRUE(finished.ok()) << finished.status();
  EXPECT_THAT(service_.ledger()["w0"], SizeIs(40));
  EXPECT_THAT(service_.opens(), SizeIs(4));
}

TEST_F(StepWriterTest, SaysWhichChunksTheServerHadCountedBefore) {
  std::atomic<bool> cut{false};
  // Counts chunk 1, loses its answer, and breaks at chunk 2.
  service_.filter = [&cut](v1::ComputeLossResponse* response) {
    return cut || !response->has_result() || response->result().chunk_index() != 1;
  };
  service_.check_chunk = [&cut](const v1::Chunk& chunk) {
    return chunk.chunk_index() == 2 && !cut.exchange(true)
               ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut")
               : grpc::Status::OK;
  };
  const auto writer = Open(Spec(1));
  ASSERT_NE(writer, nullptr);
  Rows rows(3);
  const auto result = writer->Compute(rows.View());
  ASSERT_TRUE(result.ok()) << result.status();
  rows.ExpectAnswered();
  EXPECT_GE(result->num_duplicates, 1);
  EXPECT_TRUE(writer->Finish().ok());
}

TEST_F(StepWriterTest, WaitsForTheServerToNoticeTheBreak) {
  std::atomic<int> num_opens{0};
  std::atomic<bool> cut{false};
  service_.check_open = [&num_opens](const v1::StreamOpen&) {
    return ++num_opens == 2 ? grpc::Status(grpc::StatusCode::ALREADY_EXISTS, "still there")
                            : grpc::Status::OK;
  };
  service_.check_chunk = [&cut](const v1::Chunk&) {
    return cut.exchange(true) ? grpc::Status::OK
                              : grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut");
  };
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  Rows rows(10);
  const auto result = writer->Compute(rows.View());
  ASSERT_TRUE(result.ok()) << result.status();
  rows.ExpectAnswered();
  EXPECT_EQ(num_opens, 3);
}

TEST_F(StepWriterTest, AWorkerThatIsThereAlreadyIsAnErrorAtFirst) {
  service_.check_open = [](const v1::StreamOpen&) {
    return grpc::Status(grpc::StatusCode::ALREADY_EXISTS, "stream 0 of w0 is open");
  };
  EXPECT_TRUE(absl::IsAlreadyExists(ErrorOfCompute(Spec())));
  EXPECT_THAT(service_.opens(), SizeIs(1));
}

TEST_F(StepWriterTest, SurvivesARestartOfTheConnection) {
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  Rows before(10, 1);
  ASSERT_TRUE(writer->Compute(before.View()).ok());
  server_.Stop();
  server_.Start();
  Rows after(10, 2);
  const auto result = writer->Compute(after.View());
  ASSERT_TRUE(result.ok()) << result.status();
  after.ExpectAnswered();
  EXPECT_TRUE(writer->Finish().ok());
  EXPECT_THAT(service_.ledger()["w0"], SizeIs(6));
}

TEST_F(StepWriterTest, AnotherIncarnationAbortsTheStep) {
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  server_.Stop();
  service_.incarnation += 1;
  server_.Start();
  Rows rows(10);
  const absl::Status status = writer->Compute(rows.View()).status();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("restarted"), HasSubstr(server_.address())));
}

TEST_F(StepWriterTest, OpeningWithAnotherIncarnationIsAborted) {
  WriterSpec spec = Spec();
  spec.incarnation = 0x9999;
  EXPECT_TRUE(absl::IsAborted(ErrorOfCompute(spec)));
}

TEST_F(StepWriterTest, GivesUpAfterMaxAttempts) {
  service_.check_chunk = [](const v1::Chunk&) {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "never");
  };
  const absl::Status status = ErrorOfCompute(Spec());
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("never (gave up after 3 attempts)"));
  EXPECT_THAT(service_.opens(), SizeIs(3));
}

TEST_F(StepWriterTest, AServerThatStaysAwayIsUnavailable) {
  options_.connect_timeout = absl::Milliseconds(300);
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  server_.Stop();
  Rows rows(10);
  const absl::Status status = writer->Compute(rows.View()).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(server_.address()));
}

// --- Errors -------------------------------------------------------------------------------------

TEST_F(StepWriterTest, AVerdictOfTheServerEndsTheWriterForGood) {
  service_.check_chunk = [](const v1::Chunk& chunk) {
    return chunk.chunk_index() == 1
               ? grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "chunk 1: targets[2] is 99")
               : grpc::Status::OK;
  };
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  Rows rows(10);
  const absl::Status status = writer->Compute(rows.View()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(std::string(status.message()), server_.address() + ": chunk 1: targets[2] is 99");
  EXPECT_EQ(writer->Submit(rows.View()).status(), status);
  EXPECT_EQ(writer->Wait(1).status(), status);
  EXPECT_EQ(writer->Finish().status(), status);
  EXPECT_THAT(service_.opens(), SizeIs(1));
}

TEST_F(StepWriterTest, ResultsThatBreakTheProtocolAreInternalErrors) {
  struct Case {
    const char* name;
    std::function<void(v1::ComputeLossResponse*)> change;
    const char* says;
  };
  const Case cases[] = {
      {"unknown chunk", [](auto* r) { r->mutable_result()->set_chunk_index(77); }, "chunk 77"},
      {"other rows", [](auto* r) { r->mutable_result()->set_num_tokens(1); }, "of 1 rows"},
      {"huge rows", [](auto* r) { r->mutable_result()->set_num_tokens(INT64_MAX); }, "rows"},
      {"no gradient", [](auto* r) { r->mutable_result()->clear_grad_hidden_states(); },
       "grad_hidden_states is missing"},
      {"short gradient",
       [](auto* r) { r->mutable_result()->mutable_grad_hidden_states()->resize(3); },
       "grad_hidden_states has 3 bytes, want 64"},
      {"long gradient",
       [](auto* r) { r->mutable_result()->mutable_grad_hidden_states()->resize(100); },
       "grad_hidden_states has 100 bytes, want 64"},
      {"no token_loss", [](auto* r) { r->mutable_result()->clear_token_loss(); },
       "token_loss is missing"},
      {"long argmax", [](auto* r) { r->mutable_result()->add_argmax(1); },
       "argmax has 20 bytes, want 16"},
      {"lse not asked for", [](auto* r) { r->mutable_result()->add_lse(1); },
       "lse of 4 bytes was not asked for"},
      {"top-k not asked for", [](auto* r) { r->mutable_result()->add_topk_ids(1); },
       "topk_ids of 4 bytes was not asked for"},
      {"no kind", [](auto* r) { r->Clear(); }, "holds none of opened, ended and result"},
      {"opened again", [](auto* r) { r->mutable_opened(); }, "second time"},
      {"ended before the end", [](auto* r) { r->mutable_ended(); }, "`ended`"},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(test.name);
    service_.filter = [&test](v1::ComputeLossResponse* response) {
      if (response->has_result()) test.change(response);
      return true;
    };
    const absl::Status status = ErrorOfCompute(Spec());
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(test.says), HasSubstr(server_.address())));
  }
}

TEST_F(StepWriterTest, ResultsOutOfOrderAreAnInternalError) {
  service_.hold_until = 2;
  std::atomic<uint64_t> flip{1};
  service_.filter = [&flip](v1::ComputeLossResponse* response) {
    if (response->has_result()) response->mutable_result()->set_chunk_index(flip.fetch_xor(1));
    return true;
  };
  const absl::Status status = ErrorOfCompute(Spec());
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("chunk 1"));
}

TEST_F(StepWriterTest, AResultTooManyIsAnInternalError) {
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  Rows rows(4);
  ASSERT_TRUE(writer->Compute(rows.View()).ok());
  // The answer to `end` becomes another result.
  service_.filter = [](v1::ComputeLossResponse* response) {
    if (response->has_ended()) response->mutable_result()->set_chunk_index(0);
    return true;
  };
  const absl::Status status = writer->Finish().status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("does not wait for it"));
}

TEST_F(StepWriterTest, AWrongCountAtTheEndIsAnError) {
  service_.filter = [](v1::ComputeLossResponse* response) {
    if (response->has_ended()) response->mutable_ended()->set_num_chunks_counted(2);
    return true;
  };
  EXPECT_TRUE(absl::IsInternal(ErrorOfCompute(Spec())));
  service_.filter = [](v1::ComputeLossResponse* response) {
    if (response->has_ended()) response->mutable_ended()->set_num_chunks_counted(200);
    return true;
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(ErrorOfCompute(Spec())));
}

TEST_F(StepWriterTest, BoundsOfZeroAreAnInternalError) {
  service_.max_chunk_tokens = 0;
  EXPECT_TRUE(absl::IsInternal(ErrorOfCompute(Spec())));
  service_.max_chunk_tokens = 1;
  service_.max_inflight_chunks = 0;
  EXPECT_TRUE(absl::IsInternal(ErrorOfCompute(Spec())));
}

TEST_F(StepWriterTest, RefusesBadRowsBeforeSendingAnything) {
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  Rows rows(4);
  std::vector<float> four(4);
  struct Case {
    std::function<void(LossRows*)> change;
    const char* says;
  };
  const Case cases[] = {
      {[](LossRows* r) { r->hidden_states.dtype = DType::kFloat32; }, "hidden_states is float32"},
      {[](LossRows* r) { r->hidden_states.rows = 0; }, "at least one row"},
      {[](LossRows* r) { r->hidden_states.data = nullptr; }, "null address"},
      {[](LossRows* r) { r->targets = r->targets.first(3); }, "targets has 3 elements, want 4"},
      {[&](LossRows* r) { r->token_weights = four; }, "token_weights has 4 elements, want 0"},
      {[&](LossRows* r) { r->token_temperature = four; }, "token_temperature has 4 elements"},
      {[](LossRows* r) { r->grad_hidden_states.data = nullptr; },
       "grad_hidden_states is not given"},
      {[](LossRows* r) { r->grad_hidden_states.rows = 3; },
       "grad_hidden_states is [3, 8] bfloat16"},
      {[](LossRows* r) { r->grad_hidden_states.data = const_cast<void*>(r->hidden_states.data); },
       "overlaps"},
      {[](LossRows* r) { r->token_loss = nullptr; }, "token_loss is not given"},
      {[](LossRows* r) { r->argmax = nullptr; }, "argmax is not given"},
      {[&](LossRows* r) { r->lse = four.data(); }, "lse is given"},
      {[&](LossRows* r) { r->logprob = four.data(); }, "logprob is given"},
      {[&](LossRows* r) { r->entropy = four.data(); }, "entropy is given"},
  };
  for (const Case& test : cases) {
    LossRows view = rows.View();
    test.change(&view);
    const absl::Status status = writer->Submit(view).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(test.says));
  }
  EXPECT_THAT(service_.chunk_rows(), SizeIs(0));
  EXPECT_TRUE(writer->Compute(rows.View()).ok());
}

TEST_F(StepWriterTest, RefusesBadSpecifications) {
  WriterSpec spec = Spec();
  spec.num_connections = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(ErrorOfCompute(spec)));
  spec.num_connections = kStreamsPerWorkerMax + 1;
  EXPECT_TRUE(absl::IsInvalidArgument(ErrorOfCompute(spec)));
  spec = Spec();
  spec.max_inflight_chunks = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(ErrorOfCompute(spec)));
  spec = Spec();
  spec.chunk_bytes = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(ErrorOfCompute(spec)));
}

// --- Cancelling: the caller's memory is its own again, whatever was on its way
// --------------------

TEST_F(StepWriterTest, CancelEndsAWaitAndGivesTheRowsBack) {
  service_.hold_until = 1 << 30;  // Nothing is ever answered.
  service_.max_inflight_chunks = 64;
  WriterSpec spec = Spec(16384);
  spec.num_connections = 2;
  spec.max_inflight_chunks = 64;
  const auto writer = Open(spec);
  ASSERT_NE(writer, nullptr);
  auto rows = std::make_unique<Rows>(400'000);
  const auto ticket = writer->Submit(rows->View());
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  absl::Status status;
  std::thread waiter([&] { status = writer->Wait(*ticket).status(); });
  writer->Cancel();
  waiter.join();
  rows.reset();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_TRUE(absl::IsCancelled(writer->Finish().status()));
}

TEST_F(StepWriterTest, CancelEndsABlockedSubmit) {
  service_.hold_until = 1 << 30;
  WriterSpec spec = Spec(1);
  spec.max_inflight_chunks = 1;
  const auto writer = Open(spec);
  ASSERT_NE(writer, nullptr);
  absl::Status status;
  std::thread submitter([&] {
    Rows rows(10);
    status = writer->Submit(rows.View()).status();
  });
  writer->Cancel();
  submitter.join();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

TEST_F(StepWriterTest, TheDestructorGivesTheRowsBack) {
  // The server holds every chunk at the door: what does not fit its window stays in the client.
  const auto done = std::make_shared<absl::Notification>();
  service_.check_chunk = [done](const v1::Chunk&) {
    done->WaitForNotification();
    return grpc::Status::OK;
  };
  service_.max_inflight_chunks = 64;
  WriterSpec spec = Spec(16384);
  spec.max_inflight_chunks = 64;
  auto writer = Open(spec);
  ASSERT_NE(writer, nullptr);
  auto rows = std::make_unique<Rows>(400'000);
  ASSERT_TRUE(writer->Submit(rows->View()).ok());
  writer.reset();
  rows.reset();
  done->Notify();
}

TEST_F(StepWriterTest, CancelAfterFinishKeepsTheResults) {
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  Rows rows(5);
  const auto ticket = writer->Submit(rows.View());
  ASSERT_TRUE(ticket.ok());
  ASSERT_TRUE(writer->Finish().ok());
  writer->Cancel();
  EXPECT_TRUE(writer->Wait(*ticket).ok());
}

TEST_F(StepWriterTest, CancelWhileReconnecting) {
  const auto writer = Open(Spec());
  ASSERT_NE(writer, nullptr);
  server_.Stop();
  Rows rows(10);
  const auto ticket = writer->Submit(rows.View());
  writer->Cancel();
  if (ticket.ok()) {
    EXPECT_TRUE(absl::IsCancelled(writer->Wait(*ticket).status()));
  }
}

}  // namespace
}  // namespace lmhead
