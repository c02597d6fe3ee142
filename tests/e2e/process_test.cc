// The binary as a process: how it ends, and the demo as a user runs it.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/e2e/service_fixture.h"
#include "tests/util/paths.h"
#include "tests/util/temporary_folder.h"

extern char** environ;

namespace lmhead::e2e {
namespace {

using ::testing::HasSubstr;

TEST(Process, SigtermEndsAnIdleServerWithExitCodeZero) {
  auto server = StartServer();
  auto code = server->Stop();
  LMHEAD_ASSERT_OK(code);
  EXPECT_EQ(*code, 0);
}

TEST(Process, SigtermEndsAServerWithAnOpenStepAndStreamWithExitCodeZero) {
  auto server = StartServer({"--drain_timeout_seconds=1"});  // How long the step may go on.
  auto client = ConnectTo(server->address());
  const HeadShape shape;
  LMHEAD_ASSERT_OK(CreateHead(client.get(), shape));
  auto incarnation = BeginStep(client.get(), shape, 1, 1);
  LMHEAD_ASSERT_OK(incarnation);
  WriterSpec spec{
      .head = shape.name, .step = 1, .worker = WorkerName(0), .incarnation = *incarnation};
  auto writer = client->OpenWriter(spec);
  LMHEAD_ASSERT_OK(writer);
  auto code = server->Stop();
  LMHEAD_ASSERT_OK(code);
  EXPECT_EQ(*code, 0);
}

// A child process and what it writes.
class Child {
 public:
  explicit Child(const std::vector<std::string>& arguments) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    int fd = 1;
    for (const char* name : {"stdout", "stderr"}) {
      posix_spawn_file_actions_addopen(&actions, fd++, directory_.Path(name).c_str(),
                                       O_WRONLY | O_CREAT | O_TRUNC, 0600);
    }
    std::vector<char*> argv;
    for (const std::string& argument : arguments) {
      argv.push_back(const_cast<char*>(argument.c_str()));
    }
    argv.push_back(nullptr);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // A process group of its own.
    const int error = posix_spawn(&pid_, argv[0], &actions, &attributes, argv.data(), environ);
    EXPECT_EQ(error, 0) << strerror(error);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Child() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

  void Signal(int signal, bool to_group) const { kill(to_group ? -pid_ : pid_, signal); }

  // The exit code, or minus the signal that ended it.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  // "stdout" or "stderr".
  std::string Read(const char* name) const {
    std::ifstream stream(directory_.Path(name));
    std::ostringstream text;
    text << stream.rdbuf();
    return text.str();
  }

 private:
  const TemporaryFolder directory_;
  pid_t pid_ = -1;
};

// Predictable text: a few sentences in a fixed rotation.
std::string SmallText() {
  const char* const sentences[] = {"the quick brown fox jumps over the lazy dog .",
                                   "a server keeps the weight of the head .",
                                   "each worker sends its rows , and waits for the gradient ."};
  std::string text;
  for (int i = 0; i < 240; ++i) absl::StrAppend(&text, sentences[(i * i) % 3], "\n");
  return text;
}

class TextFileTest : public ::testing::Test {
 protected:
  TextFileTest() { std::ofstream(text_) << SmallText(); }

  const TemporaryFolder directory_;
  const std::string text_ = directory_.Path("text");
};

nlohmann::json LastLine(const std::string& output) {
  const std::vector<std::string> lines = absl::StrSplit(output, '\n', absl::SkipEmpty());
  return lines.empty() ? nlohmann::json()
                       : nlohmann::json::parse(lines.back(), nullptr, /*allow_exceptions=*/false);
}

class DemoTest : public TextFileTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(DemoTest, TrainsOnASmallTextAndAgreesWithTheOracle) {
  Child demo({LmheadBinary(), "demo", absl::StrCat("--text=", text_), "--steps=40",
              absl::StrCat("--dtype=", GetParam()), absl::StrCat("--backend=", TestBackend()),
              "--hidden=32", "--json"});
  ASSERT_EQ(demo.Wait(), 0) << demo.Read("stdout") << demo.Read("stderr");
  const nlohmann::json json = LastLine(demo.Read("stdout"));
  ASSERT_TRUE(json.is_object()) << demo.Read("stdout");
  for (const char* key :
       {"first_loss", "final_loss", "heldout_loss", "unigram_entropy", "tokens_per_second",
        "peak_bytes", "dense_logits_bytes", "check_loss_error", "check_grad_error"}) {
    ASSERT_TRUE(json.contains(key) && json[key].is_number()) << key << " in " << json;
  }
  // A new head knows nothing: the logarithm of its 8192 rows, give or take the initial weights.
  EXPECT_NEAR(json["first_loss"], std::log(8192.0), 0.5);
  EXPECT_LT(json["final_loss"], json["unigram_entropy"]);
  EXPECT_LT(json["heldout_loss"], json["first_loss"]);
  EXPECT_GT(json["tokens_per_second"], 0.0);
  EXPECT_GT(json["peak_bytes"], 0);
  EXPECT_GT(json["dense_logits_bytes"], 0);
  EXPECT_THAT(demo.Read("stdout"), HasSubstr("unigram entropy"));
}

INSTANTIATE_TEST_SUITE_P(DTypes, DemoTest, ::testing::Values("fp32", "bf16"));

TEST_F(TextFileTest, DemoUsesTheServiceAtAnAddressAndLeavesNoHeadBehind) {
  const std::string more = directory_.Path("more");
  std::ofstream(more) << "One more text, after the first.";
  auto server = StartServer();
  Child demo({LmheadBinary(), "demo", "--steps=5", absl::StrCat("--address=", server->address()),
              "--json", "--text", text_, more});
  ASSERT_EQ(demo.Wait(), 0) << demo.Read("stdout") << demo.Read("stderr");
  EXPECT_THAT(demo.Read("stdout"), HasSubstr(": 2 files"));
  EXPECT_GT(LastLine(demo.Read("stdout"))["peak_bytes"], 0);
  auto info = ConnectTo(server->address())->GetServerInfo();
  LMHEAD_ASSERT_OK(info);
  EXPECT_EQ(info->heads_size(), 0);
}

TEST_F(TextFileTest, DemoSaysWhatIsWrongWithItsArguments) {
  const struct {
    std::vector<std::string> arguments;
    const char* says;
  } cases[] = {
      {{"--text=/nonexistent/file"}, "/nonexistent/file"},
      {{"--steps=0"}, "--steps"},
      {{"--dtype=int3"}, "int3"},
      {{"--hidden=-1"}, "--hidden"},
      {{"stray"}, "stray"},
  };
  for (const auto& c : cases) {
    std::vector<std::string> arguments = {LmheadBinary(), "demo"};
    arguments.insert(arguments.end(), c.arguments.begin(), c.arguments.end());
    Child demo(arguments);
    EXPECT_GT(demo.Wait(), 0) << c.says;
    EXPECT_THAT(demo.Read("stderr"), HasSubstr(c.says));
  }
}

// Whether only the demo gets the signal (kill), or its service as well (Ctrl-C at a terminal).
class InterruptTest : public TextFileTest, public ::testing::WithParamInterface<bool> {};

TEST_P(InterruptTest, StopsTheDemosService) {
  Child demo({LmheadBinary(), "demo", absl::StrCat("--text=", text_), "--steps=1000000"});
  const auto service_pid = [&] {
    const std::string output = demo.Read("stdout");
    const size_t at = output.find("(process ");
    return at == std::string::npos ? 0 : std::atoi(output.c_str() + at + 9);
  };
  pid_t service = 0;
  for (int i = 0; i < 600 && (service = service_pid()) == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  ASSERT_GT(service, 0) << demo.Read("stdout") << demo.Read("stderr");
  EXPECT_EQ(kill(service, 0), 0);
  demo.Signal(SIGINT, /*to_group=*/GetParam());
  EXPECT_EQ(demo.Wait(), 130);
  EXPECT_EQ(kill(service, 0), -1);
  EXPECT_THAT(demo.Read("stdout"), HasSubstr("Interrupted"));
}

INSTANTIATE_TEST_SUITE_P(Group, InterruptTest, ::testing::Bool());

}  // namespace
}  // namespace lmhead::e2e
