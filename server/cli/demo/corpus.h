// Text for the demo: where it comes from, its words, its vocabulary, and which part is held out.
//
// Everything here is a pure function of the text: no randomness.

#ifndef LMHEAD_SERVER_CLI_DEMO_CORPUS_H_
#define LMHEAD_SERVER_CLI_DEMO_CORPUS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"

namespace lmhead::demo {

// Words that the model sees before the one it predicts.
inline constexpr int kContextWords = 8;

// One source of text.
struct TextFile {
  std::string path;
  std::string text;
};

// Reads files, and every regular file below folders, in order of name. Symbolic links are followed,
// and a text that was read before (same file or same contents) is left out, as are binary files of
// folders. NOT_FOUND naming a path that cannot be read; INVALID_ARGUMENT for a named binary file.
absl::StatusOr<std::vector<TextFile>> ReadTexts(const std::vector<std::string>& paths);

// The text used when none is named: the licences in `licences` when there are any, else README.md
// and docs/*.md of the first folder above `binary` that has them. NOT_FOUND saying what to pass
// when there is neither.
absl::StatusOr<std::vector<TextFile>> ReadDefaultTexts(
    const std::string& binary, const std::string& licences = "/usr/share/common-licenses");

// Lower-cased words (letters, digits, inner apostrophes; bytes above 127 count as letters) and
// single punctuation marks. Spaces and control characters separate.
std::vector<std::string> Tokenize(std::string_view text);

// Words by falling frequency; ties by spelling.
class Vocabulary {
 public:
  static constexpr int32_t kUnknown = 0;        // "<unk>": a word not in the vocabulary.
  static constexpr int32_t kDocumentStart = 1;  // "<s>": stands before a text's first word.
  static constexpr int32_t kNumSpecial = 2;
  static constexpr int64_t kSizeMin = 8192;  // Padded to this with reserved entries.
  static constexpr int64_t kSizeMax = 16384;

  // Keeps words that occur at least twice: those seen once teach what <unk> looks like.
  static Vocabulary Build(const std::vector<std::string>& words);

  int32_t Id(std::string_view word) const;
  const std::string& Word(int32_t id) const { return words_[id]; }  // REQUIRES: id < num_words()
  int64_t num_words() const { return static_cast<int64_t>(words_.size()); }  // Special ones too.
  int64_t size() const;                                                      // Rows of the head.

 private:
  std::vector<std::string> words_;
  std::unordered_map<std::string, int32_t> ids_;
};

// Texts as ids, with the positions that are trained on and those held out.
struct Corpus {
  Vocabulary vocabulary;  // Of the training positions.
  int64_t num_files = 0;
  int64_t num_bytes = 0;

  // All texts, each behind kContextWords times kDocumentStart, so that a context never reaches into
  // another text.
  std::vector<int32_t> ids;

  // Indices into `ids` of the words to predict. Held out: every tenth block of consecutive words.
  std::vector<int32_t> training_positions;
  std::vector<int32_t> heldout_positions;
  int64_t block_words = 0;

  // Nats a word: entropy of the training words' frequencies, and what that distribution costs on
  // the held-out words.
  double unigram_entropy = 0.0;
  double heldout_unigram_loss = 0.0;
};

// INVALID_ARGUMENT when there are fewer than kCorpusWordsMin words.
inline constexpr int64_t kCorpusWordsMin = 200;
absl::StatusOr<Corpus> BuildCorpus(const std::vector<TextFile>& files);

}  // namespace lmhead::demo

#endif  // LMHEAD_SERVER_CLI_DEMO_CORPUS_H_
