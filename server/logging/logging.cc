#include "server/logging/logging.h"

#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/stdout_color_sinks.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

thread_local const LogScope* current_scope = nullptr;

std::string_view View(const spdlog::string_view_t& text) { return {text.data(), text.size()}; }

// "%*" of the text format: the request, when there is one.
class RequestFlag final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg&, const std::tm&,
              spdlog::memory_buf_t& output) override {
    const std::string id = LogScope::Current().request_id;
    if (id.empty()) return;
    const std::string text = absl::StrCat(" [request ", id, "]");
    output.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<RequestFlag>();
  }
};

class JsonFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& output) override {
    nlohmann::ordered_json line;
    line["time"] = absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ", absl::FromChrono(message.time),
                                    absl::UTCTimeZone());
    line["level"] = View(spdlog::level::to_string_view(message.level));
    line["message"] = View(message.payload);
    const LogFields fields = LogScope::Current();
    if (!fields.request_id.empty()) line["request_id"] = fields.request_id;
    if (!fields.head.empty()) line["head"] = fields.head;
    if (fields.step != 0) line["step"] = fields.step;
    if (!fields.worker.empty()) line["worker"] = fields.worker;
    if (fields.chunk.has_value()) line["chunk"] = *fields.chunk;
    const std::string text =
        line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    output.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<formatter> clone() const override { return std::make_unique<JsonFormatter>(); }
};

}  // namespace

LogScope::LogScope(const LogFields& fields)
    : fields_(&fields), outer_(std::exchange(current_scope, this)) {}

LogScope::~LogScope() { current_scope = outer_; }

LogFields LogScope::Current() {
  LogFields sum;
  for (const LogScope* scope = current_scope; scope != nullptr; scope = scope->outer_) {
    const LogFields& fields = *scope->fields_;
    if (sum.request_id.empty()) sum.request_id = fields.request_id;
    if (sum.head.empty()) sum.head = fields.head;
    if (sum.step == 0) sum.step = fields.step;
    if (sum.worker.empty()) sum.worker = fields.worker;
    if (!sum.chunk.has_value()) sum.chunk = fields.chunk;
  }
  return sum;
}

std::unique_ptr<spdlog::formatter> MakeLogFormatter(LogFormat format) {
  if (format == LogFormat::kJson) return std::make_unique<JsonFormatter>();
  auto text = std::make_unique<spdlog::pattern_formatter>();
  text->add_flag<RequestFlag>('*').set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ %v%*");
  return text;
}

absl::Status SetUpLogging(const std::string& level_name, const std::string& format_name) {
  const spdlog::level::level_enum level = spdlog::level::from_str(level_name);
  if (level == spdlog::level::off && level_name != "off") {
    return absl::InvalidArgumentError(absl::StrCat("--log_level: got '", level_name,
                                                   "', wanted debug, info, warn, error or off"));
  }
  if (format_name != "text" && format_name != "json") {
    return absl::InvalidArgumentError(
        absl::StrCat("--log_format: got '", format_name, "', wanted text or json"));
  }
  spdlog::set_default_logger(spdlog::stderr_color_mt("lmhead"));
  spdlog::set_formatter(
      MakeLogFormatter(format_name == "json" ? LogFormat::kJson : LogFormat::kText));
  spdlog::set_level(level);
  spdlog::flush_on(spdlog::level::info);
  return absl::OkStatus();
}

}  // namespace lmhead
