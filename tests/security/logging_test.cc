#include "server/logging/logging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "spdlog/sinks/ostream_sink.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

class LoggingTest : public ::testing::Test {
 protected:
  void Use(LogFormat format) {
    auto sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(output_);
    logger_ = std::make_unique<spdlog::logger>("test", std::move(sink));
    logger_->set_formatter(MakeLogFormatter(format));
  }

  std::ostringstream output_;
  std::unique_ptr<spdlog::logger> logger_;
};

TEST_F(LoggingTest, TextEndsWithTheRequest) {
  Use(LogFormat::kText);
  logger_->info("plain");
  {
    const LogFields fields = {.request_id = "abc", .head = "lm", .step = 3};
    const LogScope scope(fields);
    logger_->info("in a call");
  }
  logger_->info("plain again");
  const std::vector<std::string> lines = absl::StrSplit(output_.str(), '\n');
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_THAT(lines[0], EndsWith(" plain"));
  EXPECT_THAT(lines[1], EndsWith(" in a call [request abc]"));
  EXPECT_THAT(lines[2], EndsWith(" plain again"));
}

TEST_F(LoggingTest, JsonHasOneObjectALineWithWhatIsKnown) {
  Use(LogFormat::kJson);
  const LogFields call = {.request_id = "abc", .head = "lm", .step = 3};
  const LogScope scope(call);
  {
    const LogFields stream = {.worker = "w0", .chunk = 0};
    const LogScope inner(stream);
    logger_->warn("a \"quoted\"\nmessage \xff");
  }
  // Fields are of a thread.
  std::thread([&] { logger_->error("elsewhere"); }).join();
  const std::vector<std::string> lines = absl::StrSplit(output_.str(), '\n');
  ASSERT_EQ(lines.size(), 3u);
  const nlohmann::json line = nlohmann::json::parse(lines[0]);
  absl::Time time;
  std::string error;
  EXPECT_TRUE(absl::ParseTime(absl::RFC3339_full, line["time"].get<std::string>(), &time, &error))
      << line;
  EXPECT_EQ(line["level"], "warning");
  EXPECT_THAT(line["message"].get<std::string>(), HasSubstr("\"quoted\"\nmessage"));
  EXPECT_EQ(line["request_id"], "abc");
  EXPECT_EQ(line["head"], "lm");
  EXPECT_EQ(line["step"], 3);
  EXPECT_EQ(line["worker"], "w0");
  EXPECT_EQ(line["chunk"], 0);
  const nlohmann::json other = nlohmann::json::parse(lines[1]);
  EXPECT_EQ(other["level"], "error");
  EXPECT_FALSE(other.contains("request_id"));
  EXPECT_FALSE(other.contains("step"));
}

TEST(SetUpLogging, RefusesOtherNames) {
  EXPECT_THAT(std::string(SetUpLogging("loud", "text").message()), HasSubstr("--log_level"));
  EXPECT_THAT(std::string(SetUpLogging("info", "xml").message()), HasSubstr("--log_format"));
}

}  // namespace
}  // namespace lmhead
