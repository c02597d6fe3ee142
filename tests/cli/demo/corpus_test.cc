#include "server/cli/demo/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/util/temporary_folder.h"

namespace lmhead::demo {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TextFolder : public TemporaryFolder {
 public:
  // The path of a new file.
  std::string Write(const std::string& name, const std::string& text) const {
    std::string path = Path(name);
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
};

std::vector<std::string> Paths(const std::vector<TextFile>& files) {
  std::vector<std::string> names;
  for (const TextFile& file : files) names.push_back(fs::path(file.path).filename());
  return names;
}

TEST(Tokenize, SplitsWordsAndPunctuation) {
  EXPECT_THAT(Tokenize("The GNU's code, version 2.1; \"don't\"\n\tcopy 'it'"),
              ElementsAre("the", "gnu's", "code", ",", "version", "2", ".", "1", ";", "\"", "don't",
                          "\"", "copy", "'", "it", "'"));
  EXPECT_THAT(Tokenize(""), IsEmpty());
  EXPECT_THAT(Tokenize(" \n\x01\x7f"), IsEmpty());
}

TEST(Tokenize, KeepsLettersOutsideAsciiAndSplitsTypographicMarks) {
  EXPECT_THAT(Tokenize("caf\u00e9 \u201cFree\u201d\u2014na\u00efve\u00a9x \u00a71"),
              ElementsAre("caf\u00e9", "\u201c", "free", "\u201d", "\u2014", "na\u00efve", "\u00a9",
                          "x", "\u00a7", "1"));
  // Cut in the middle of a sequence: no read past the end, nothing lost.
  EXPECT_THAT(Tokenize("a \xe2\x80"), ElementsAre("a", "\xe2\x80"));
  EXPECT_THAT(Tokenize("\xc2"), ElementsAre("\xc2"));
}

TEST(Vocabulary, SortsByFrequencyAndMapsRareWordsToUnknown) {
  const Vocabulary vocabulary = Vocabulary::Build({"b", "a", "b", "c", "b", "a", "c", "rare", "a"});
  ASSERT_EQ(vocabulary.num_words(), 5);
  EXPECT_EQ(vocabulary.Id("a"), 2);  // As frequent as b, before it by spelling.
  EXPECT_EQ(vocabulary.Id("b"), 3);
  EXPECT_EQ(vocabulary.Id("c"), 4);
  EXPECT_EQ(vocabulary.Id("rare"), Vocabulary::kUnknown);
  EXPECT_EQ(vocabulary.Id("<unk>"), Vocabulary::kUnknown);
  EXPECT_EQ(vocabulary.Word(3), "b");
  EXPECT_EQ(vocabulary.size(), Vocabulary::kSizeMin);
}

TEST(Vocabulary, GrowsBeyondTheMinimumAndStopsAtTheMaximum) {
  std::vector<std::string> words;
  for (int i = 0; i < 10000; ++i) words.insert(words.end(), 2, absl::StrCat("w", i));
  EXPECT_EQ(Vocabulary::Build(words).size(), 10002);
  for (int i = 10000; i < 40000; ++i) words.insert(words.end(), 2, absl::StrCat("w", i));
  EXPECT_EQ(Vocabulary::Build(words).size(), Vocabulary::kSizeMax);
}

TEST(ReadTexts, FollowsLinksAndReadsEachTextOnce) {
  const TextFolder folder;
  folder.Write("GPL-3", "three");
  folder.Write("GPL-2", "two");
  folder.Write("copy-of-2", "two");
  folder.Write("sub/deep", "deep");
  folder.Write("binary", std::string("a\0b", 3));
  fs::create_symlink("GPL-3", folder.Path("GPL"));
  const auto files = ReadTexts({folder.path()});
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_THAT(Paths(*files), ElementsAre("GPL", "GPL-2", "deep"));
  EXPECT_EQ((*files)[0].text, "three");
}

TEST(ReadTexts, NamesWhatItCannotRead) {
  const TextFolder folder;
  const auto missing = ReadTexts({folder.Path("nowhere")});
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("nowhere"));
  const auto binary = ReadTexts({folder.Write("zero", std::string("\0", 1))});
  EXPECT_EQ(binary.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(binary.status().message()), HasSubstr("zero"));
}

TEST(ReadDefaultTexts, PrefersLicencesThenTheProjectsDocsThenSaysWhatToDo) {
  const TextFolder folder;
  folder.Write("project/README.md", "readme");
  folder.Write("project/docs/A.md", "a");
  folder.Write("project/docs/picture.png", "no");
  const std::string binary = folder.Write("project/build/bin/lmhead", "elf");
  folder.Write("licences/BSD", "bsd");

  const auto licences = ReadDefaultTexts(binary, folder.Path("licences"));
  ASSERT_TRUE(licences.ok()) << licences.status();
  EXPECT_THAT(Paths(*licences), ElementsAre("BSD"));

  const std::string nowhere = folder.Path("nowhere");
  const auto docs = ReadDefaultTexts(binary, nowhere);
  ASSERT_TRUE(docs.ok()) << docs.status();
  EXPECT_THAT(Paths(*docs), ElementsAre("README.md", "A.md"));

  const auto none = ReadDefaultTexts(folder.Write("bin/lmhead", "elf"), nowhere);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("--text"));
}

std::string NumberedWords(int count, int distinct) {
  std::string text;
  for (int i = 0; i < count; ++i) absl::StrAppend(&text, "w", i % distinct, " ");
  return text;
}

TEST(BuildCorpus, HoldsOutATenthInContiguousBlocks) {
  const auto corpus = BuildCorpus({{"a", NumberedWords(8000, 50)}, {"b", NumberedWords(2240, 50)}});
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  EXPECT_EQ(corpus->block_words, 256);
  EXPECT_EQ(corpus->training_positions.size() + corpus->heldout_positions.size(), 10240u);
  EXPECT_EQ(corpus->heldout_positions.size(), 1024u);

  const std::set<int32_t> training(corpus->training_positions.begin(),
                                   corpus->training_positions.end());
  int blocks = 1;
  for (size_t i = 0; i < corpus->heldout_positions.size(); ++i) {
    ASSERT_FALSE(training.contains(corpus->heldout_positions[i]));
    if (i > 0 && corpus->heldout_positions[i] != corpus->heldout_positions[i - 1] + 1) ++blocks;
  }
  EXPECT_EQ(blocks, 4);
}

TEST(BuildCorpus, ContextsNeverReachIntoAnotherText) {
  const auto corpus = BuildCorpus({{"a", NumberedWords(300, 10)}, {"b", NumberedWords(300, 10)}});
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  EXPECT_EQ(corpus->ids.size(), 600u + 2 * kContextWords);
  for (int text : {0, 1}) {
    for (int k = 0; k < kContextWords; ++k) {
      EXPECT_EQ(corpus->ids[text * (300 + kContextWords) + k], Vocabulary::kDocumentStart);
    }
  }
  EXPECT_EQ(corpus->training_positions.front(), kContextWords);
}

TEST(BuildCorpus, UnigramEntropyOfEqualFrequenciesIsTheirLogarithm) {
  const auto corpus = BuildCorpus({{"a", NumberedWords(1000, 50)}});
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  EXPECT_EQ(corpus->block_words, 50);  // So that training has each word equally often.
  EXPECT_NEAR(corpus->unigram_entropy, std::log(50.0), 1e-12);
  EXPECT_NEAR(corpus->heldout_unigram_loss, std::log(50.0), 1e-12);
}

TEST(BuildCorpus, HeldOutWordsThatTrainingNeverHadHaveAFiniteLoss) {
  // The held-out block is the only place of its words: they become <unk>, which training lacks.
  const std::string text = NumberedWords(1000, 50);
  const auto plain = BuildCorpus({{"a", text}});
  ASSERT_TRUE(plain.ok());
  std::vector<std::string> words = Tokenize(text);
  for (int i = 250; i < 300; ++i) words[i] = absl::StrCat("only", i);
  std::string changed;
  for (const std::string& word : words) absl::StrAppend(&changed, word, " ");
  const auto corpus = BuildCorpus({{"a", changed}});
  ASSERT_TRUE(corpus.ok());
  EXPECT_EQ(corpus->ids[corpus->heldout_positions[0]], Vocabulary::kUnknown);
  EXPECT_TRUE(std::isfinite(corpus->heldout_unigram_loss));
  EXPECT_GT(corpus->heldout_unigram_loss, plain->heldout_unigram_loss);
}

TEST(BuildCorpus, RefusesTooLittleText) {
  const auto corpus = BuildCorpus({{"a", NumberedWords(199, 10)}});
  EXPECT_EQ(corpus.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(corpus.status().message()), HasSubstr("199 words"));
  EXPECT_TRUE(BuildCorpus({{"a", NumberedWords(200, 10)}}).ok());
}

}  // namespace
}  // namespace lmhead::demo
