#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "client/c/lmhead.h"
#include "client/cpp/local_server.h"
#include "tests/c/c_worker.h"
#include "tests/util/paths.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

// A call's code and text.
struct Outcome {
  lmhead_status code;
  std::string message;
};

template <typename Call>
Outcome OutcomeOf(Call call) {
  lmhead_error* error = nullptr;
  const lmhead_status code = call(&error);
  EXPECT_EQ(lmhead_error_code(error), code);
  Outcome outcome = {code, lmhead_error_message(error)};
  lmhead_error_free(error);
  return outcome;
}

template <typename Call>
void ExpectInvalid(Call call, const char* text) {
  const Outcome outcome = OutcomeOf(call);
  EXPECT_EQ(outcome.code, LMHEAD_INVALID_ARGUMENT) << outcome.message;
  EXPECT_THAT(outcome.message, HasSubstr(text));
}

class CAbiTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto server = LocalServer::Start(PathBesideTest("lmhead"), {"--backend=" + TestBackend()});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = server->release();
  }
  static void TearDownTestSuite() { delete server_; }

  void SetUp() override {
    const char* address = server_->address().c_str();
    ASSERT_EQ(lmhead_client_connect(address, nullptr, &client_, nullptr), LMHEAD_OK);
  }
  void TearDown() override { lmhead_client_close(client_); }

  std::string Call(const char* method, const std::string& request) {
    char* json = nullptr;
    const Outcome outcome = OutcomeOf([&](lmhead_error** error) {
      return lmhead_client_call(client_, method, request.c_str(), 0, &json, error);
    });
    EXPECT_EQ(outcome.code, LMHEAD_OK) << outcome.message;
    std::string answer = json == nullptr ? "" : json;
    lmhead_string_free(json);
    return answer;
  }

  // A frozen head of 8 x 4 and an evaluation of it.
  lmhead_writer* OpenEvaluation() {
    Call("CreateHead",
         R"({"spec": {"name": "frozen", "vocab_size": 8, "hidden_size": 4,
             "weight_dtype": "DTYPE_FLOAT32", "weight_init": {"kind": "KIND_ZEROS"}}})");
    lmhead_writer* writer = nullptr;
    const Outcome outcome = OutcomeOf([&](lmhead_error** error) {
      return lmhead_writer_open(client_, R"({"head": "frozen", "hidden_dtype": "DTYPE_FLOAT32"})",
                                nullptr, &writer, error);
    });
    EXPECT_EQ(outcome.code, LMHEAD_OK) << outcome.message;
    return writer;
  }

  static lmhead_loss_rows Rows() {
    static const float hidden[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    static const int32_t targets[2] = {0, 7};
    lmhead_loss_rows rows = LMHEAD_LOSS_ROWS_INIT;
    rows.num_tokens = 2;
    rows.hidden_size = 4;
    rows.hidden_states = hidden;
    rows.targets = targets;
    return rows;
  }

  static LocalServer* server_;
  lmhead_client* client_ = nullptr;
};

LocalServer* CAbiTest::server_ = nullptr;

TEST_F(CAbiTest, AWorkerInCTrainsAStep) {
  double loss_sum = 0.0;
  float weight[32];
  char message[1024] = "";
  ASSERT_EQ(RunCWorker(server_->address().c_str(), &loss_sum, weight, message), 0) << message;
  EXPECT_NEAR(loss_sum, 2 * std::log(8.0), 1e-6);
  // Zero weights: the gradient is (1/8 - [row = target]) hidden, times 0.5.
  EXPECT_FLOAT_EQ(weight[2 * 4 + 0], 0.5f * 0.875f);
  EXPECT_FLOAT_EQ(weight[3 * 4 + 0], -0.5f * 0.125f);
  EXPECT_FLOAT_EQ(weight[5 * 4 + 2], 0.5f * 0.875f);
  EXPECT_FLOAT_EQ(weight[0 * 4 + 1], 0.0f);  // Ignored.
}

TEST_F(CAbiTest, TheVersionIsTheHeaders) {
  int32_t major = 0;
  int32_t minor = 0;
  lmhead_api_version(&major, &minor);
  EXPECT_EQ(major, LMHEAD_API_VERSION_MAJOR);
  EXPECT_EQ(minor, LMHEAD_API_VERSION_MINOR);
  lmhead_api_version(nullptr, nullptr);
  EXPECT_THAT(Call("GetServerInfo", ""), HasSubstr(lmhead_version()));
}

TEST_F(CAbiTest, NullPointersAreNamed) {
  lmhead_client* client = nullptr;
  char* json = nullptr;
  lmhead_writer* writer = nullptr;
  uint64_t number = 0;
  float value = 0.0f;
  const auto connect = [&](const char* address, lmhead_client** to) {
    return [=](lmhead_error** e) { return lmhead_client_connect(address, nullptr, to, e); };
  };
  ExpectInvalid(connect(nullptr, &client), "address");
  ExpectInvalid(connect("localhost:1", nullptr), "client");
  const auto call = [&](lmhead_client* c, const char* method, char** to) {
    return [=](lmhead_error** e) { return lmhead_client_call(c, method, nullptr, 0, to, e); };
  };
  ExpectInvalid(call(nullptr, "GetHead", &json), "client");
  ExpectInvalid(call(client_, nullptr, &json), "method");
  ExpectInvalid(call(client_, "GetHead", nullptr), "response_json");
  const auto load = [&](lmhead_client* c, const char* head, const void* rows) {
    return [=](lmhead_error** e) {
      return lmhead_client_load_weights(c, head, LMHEAD_WEIGHT, LMHEAD_FLOAT32, 0, 1, 1, rows, e);
    };
  };
  ExpectInvalid(load(nullptr, "lm", &value), "client");
  ExpectInvalid(load(client_, nullptr, &value), "head");
  ExpectInvalid(load(client_, "lm", nullptr), "rows");
  const auto read = [&](lmhead_client* c, const char* head, void* rows) {
    return [=](lmhead_error** e) {
      return lmhead_client_read_weights(c, head, LMHEAD_WEIGHT, LMHEAD_FLOAT32, 0, 1, 1, rows, e);
    };
  };
  ExpectInvalid(read(nullptr, "lm", &value), "client");
  ExpectInvalid(read(client_, nullptr, &value), "head");
  ExpectInvalid(read(client_, "lm", nullptr), "rows");
  const auto add = [&](lmhead_client* c, const char* head, const char* worker, const float* rows,
                       uint64_t* pieces) {
    return [=](lmhead_error** e) {
      return lmhead_client_accumulate_weight_gradient(c, head, 1, 1, worker, 0, 0, nullptr, 1, 1,
                                                      rows, pieces, e);
    };
  };
  ExpectInvalid(add(nullptr, "lm", "w", &value, &number), "client");
  ExpectInvalid(add(client_, nullptr, "w", &value, &number), "head");
  ExpectInvalid(add(client_, "lm", nullptr, &value, &number), "worker");
  ExpectInvalid(add(client_, "lm", "w", nullptr, &number), "rows");
  ExpectInvalid(add(client_, "lm", "w", &value, nullptr), "num_pieces");
  const auto open = [&](lmhead_client* c, const char* text, lmhead_writer** to) {
    return [=](lmhead_error** e) { return lmhead_writer_open(c, text, nullptr, to, e); };
  };
  ExpectInvalid(open(nullptr, "{}", &writer), "client");
  ExpectInvalid(open(client_, nullptr, &writer), "open_json");
  ExpectInvalid(open(client_, "{}", nullptr), "writer");
  lmhead_client_close(nullptr);
  lmhead_writer_cancel(nullptr);
  lmhead_writer_close(nullptr);
  lmhead_string_free(nullptr);
}

TEST_F(CAbiTest, NullPointersOfAWriterAreNamed) {
  lmhead_writer* writer = OpenEvaluation();
  lmhead_loss_rows rows = Rows();
  uint64_t ticket = 0;
  lmhead_loss_result result = LMHEAD_LOSS_RESULT_INIT;
  const auto submit = [&](lmhead_writer* w, const lmhead_loss_rows* r, uint64_t* t) {
    return [=](lmhead_error** e) { return lmhead_writer_submit(w, r, t, e); };
  };
  ExpectInvalid(submit(nullptr, &rows, &ticket), "writer");
  ExpectInvalid(submit(writer, nullptr, &ticket), "rows");
  ExpectInvalid(submit(writer, &rows, nullptr), "ticket");
  ExpectInvalid([&](lmhead_error** e) { return lmhead_writer_wait(nullptr, 1, &result, e); },
                "writer");
  ExpectInvalid(
      [&](lmhead_error** e) { return lmhead_writer_compute(writer, nullptr, &result, e); }, "rows");
  ExpectInvalid([&](lmhead_error** e) { return lmhead_writer_finish(nullptr, nullptr, e); },
                "writer");
  rows.hidden_states = nullptr;
  ExpectInvalid(submit(writer, &rows, &ticket), "hidden_states");
  rows = Rows();
  rows.targets = nullptr;
  ExpectInvalid(submit(writer, &rows, &ticket), "targets");
  // None of it has harmed the writer.
  rows = Rows();
  EXPECT_EQ(lmhead_writer_compute(writer, &rows, &result, nullptr), LMHEAD_OK);
  EXPECT_NEAR(result.loss_sum, 2 * std::log(8.0), 1e-6);
  EXPECT_EQ(lmhead_writer_compute(writer, &rows, nullptr, nullptr), LMHEAD_OK);
  lmhead_writer_close(writer);
}

TEST_F(CAbiTest, StructsOfOtherVersions) {
  lmhead_writer* writer = OpenEvaluation();
  lmhead_loss_result result = LMHEAD_LOSS_RESULT_INIT;
  // A caller with a newer header that leaves its new field alone, and one that sets it.
  struct Newer {
    lmhead_loss_rows rows;
    const void* later;
  } newer = {Rows(), nullptr};
  newer.rows.struct_size = sizeof(Newer);
  EXPECT_EQ(lmhead_writer_compute(writer, &newer.rows, &result, nullptr), LMHEAD_OK);
  newer.later = &newer;
  const Outcome unknown = OutcomeOf(
      [&](lmhead_error** e) { return lmhead_writer_compute(writer, &newer.rows, &result, e); });
  EXPECT_EQ(unknown.code, LMHEAD_UNIMPLEMENTED) << unknown.message;
  // One that forgot to set the size.
  lmhead_loss_rows forgotten = Rows();
  forgotten.struct_size = 0;
  ExpectInvalid(
      [&](lmhead_error** e) { return lmhead_writer_compute(writer, &forgotten, &result, e); },
      "rows.struct_size");
  result.struct_size = 8;
  const lmhead_loss_rows rows = Rows();
  ExpectInvalid([&](lmhead_error** e) { return lmhead_writer_compute(writer, &rows, &result, e); },
                "result.struct_size");
  // A result with more room than the library fills.
  struct NewerResult {
    lmhead_loss_result result;
    double later;
  } newer_result = {LMHEAD_LOSS_RESULT_INIT, -1.0};
  newer_result.result.struct_size = sizeof(NewerResult);
  EXPECT_EQ(lmhead_writer_compute(writer, &rows, &newer_result.result, nullptr), LMHEAD_OK);
  EXPECT_EQ(newer_result.later, -1.0);
  EXPECT_EQ(newer_result.result.num_tokens, 2);
  lmhead_writer_close(writer);
}

TEST_F(CAbiTest, NumbersOutOfRangeAreNamed) {
  lmhead_writer* writer = OpenEvaluation();
  const auto compute = [&](void (*change)(lmhead_loss_rows&)) {
    return [=](lmhead_error** e) {
      lmhead_loss_rows rows = Rows();
      change(rows);
      return lmhead_writer_compute(writer, &rows, nullptr, e);
    };
  };
  ExpectInvalid(compute([](lmhead_loss_rows& rows) { rows.num_tokens = 0; }), "num_tokens is 0");
  ExpectInvalid(compute([](lmhead_loss_rows& rows) { rows.num_tokens = INT64_MAX; }), "num_tokens");
  ExpectInvalid(compute([](lmhead_loss_rows& rows) { rows.hidden_size = -4; }),
                "hidden_size is -4");
  ExpectInvalid(compute([](lmhead_loss_rows& rows) { rows.hidden_dtype = 9; }),
                "hidden_dtype is 9");
  ExpectInvalid(compute([](lmhead_loss_rows& rows) { rows.grad_scale = NAN; }), "grad_scale");
  lmhead_writer_close(writer);

  float value = 0.0f;
  const auto load = [&](int32_t tensor, int32_t dtype, int64_t rows, int64_t columns) {
    return [=, this, &value](lmhead_error** e) {
      return lmhead_client_load_weights(client_, "frozen", tensor, dtype, 0, rows, columns, &value,
                                        e);
    };
  };
  ExpectInvalid(load(0, LMHEAD_FLOAT32, 1, 1), "tensor is 0");
  ExpectInvalid(load(99, LMHEAD_FLOAT32, 1, 1), "tensor is 99");
  ExpectInvalid(load(LMHEAD_WEIGHT, 0, 1, 1), "dtype is 0");
  ExpectInvalid(load(LMHEAD_WEIGHT, LMHEAD_FLOAT32, -1, 1), "[-1, 1]");
  ExpectInvalid(load(LMHEAD_WEIGHT, LMHEAD_FLOAT32, INT64_MAX, INT64_MAX), "rows");

  lmhead_client_options options = LMHEAD_CLIENT_OPTIONS_INIT;
  options.connect_timeout_seconds = NAN;
  lmhead_client* client = nullptr;
  const auto connect = [&](lmhead_error** e) {
    return lmhead_client_connect("localhost:1", &options, &client, e);
  };
  ExpectInvalid(connect, "connect_timeout_seconds");
  options = LMHEAD_CLIENT_OPTIONS_INIT;
  options.max_attempts = 0;
  ExpectInvalid(connect, "max_attempts");
}

TEST_F(CAbiTest, JsonThatDoesNotFitIsRefused) {
  char* json = nullptr;
  for (const char* text : {"{", "[]", "{\"head\": 3}", "{\"unknown\": 1}", "\xff\xfe"}) {
    const Outcome outcome = OutcomeOf([&](lmhead_error** e) {
      return lmhead_client_call(client_, "GetHead", text, 0, &json, e);
    });
    EXPECT_EQ(outcome.code, LMHEAD_INVALID_ARGUMENT) << text;
    EXPECT_EQ(json, nullptr);
  }
  lmhead_writer* writer = nullptr;
  ExpectInvalid(
      [&](lmhead_error** e) { return lmhead_writer_open(client_, "{}", nullptr, &writer, e); },
      "hidden_dtype");
  const char* indexed = R"({"hidden_dtype": "DTYPE_FLOAT32", "stream_index": 1})";
  ExpectInvalid(
      [&](lmhead_error** e) { return lmhead_writer_open(client_, indexed, nullptr, &writer, e); },
      "stream_index");
}

TEST_F(CAbiTest, KeepsTheServersCode) {
  char* json = nullptr;
  const Outcome outcome = OutcomeOf([&](lmhead_error** e) {
    return lmhead_client_call(client_, "GetHead", R"({"head": "nobody"})", 0, &json, e);
  });
  EXPECT_EQ(outcome.code, LMHEAD_NOT_FOUND);
  EXPECT_THAT(outcome.message, HasSubstr("nobody"));
}

TEST_F(CAbiTest, CancelledAndFinishedWriters) {
  lmhead_writer* writer = OpenEvaluation();
  const lmhead_loss_rows rows = Rows();
  uint64_t ticket = 0;
  lmhead_writer_cancel(writer);
  EXPECT_EQ(lmhead_writer_submit(writer, &rows, &ticket, nullptr), LMHEAD_CANCELLED);
  lmhead_writer_close(writer);

  writer = OpenEvaluation();
  ASSERT_EQ(lmhead_writer_submit(writer, &rows, &ticket, nullptr), LMHEAD_OK);
  uint64_t num_chunks = 0;
  EXPECT_EQ(lmhead_writer_finish(writer, &num_chunks, nullptr), LMHEAD_OK);
  EXPECT_EQ(num_chunks, 1u);
  EXPECT_EQ(lmhead_writer_wait(writer, ticket, nullptr, nullptr), LMHEAD_OK);
  ExpectInvalid([&](lmhead_error** e) { return lmhead_writer_wait(writer, ticket, nullptr, e); },
                "ticket");
  EXPECT_EQ(lmhead_writer_submit(writer, &rows, &ticket, nullptr), LMHEAD_FAILED_PRECONDITION);
  lmhead_writer_close(writer);
}

}  // namespace
}  // namespace lmhead
